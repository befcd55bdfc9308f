"""Tells a hang from a long step, by heartbeats that stand still and stacks that do not change; pure, like health.py."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from pathlib import Path

from keepstep.failure import WorkerFailure
from keepstep.observe.health import Verdict
from keepstep.observe.heart import Reading
from keepstep.observe.stacks import Frame, where

_LOOPING = ("data", "transfer", "step", "replay", "validation")
_ELSEWHERE = 10.0
"""How many times longer start-up, the first steps, saving and the time between loops may stand still."""
_USUAL = 5.0
"""How many times longer than ever before in this attempt a phase must last."""
_NEXT_LOOK = 1 / 6
"""Stacks are compared after this part of the time-out."""
_FIRST_STEPS = 3
"""These compile what they run, for minutes."""
_DEBUGGERS = ("/pdb.py", "/bdb.py", "/ipdb/", "/IPython/", "/pydevd", "/debugpy/")
"""Who stands there thinks."""
_MEETING = ("/torch/distributed/", "/torch/autograd/", "/torch/nn/parallel/", "/keepstep/collective.py")
"""Where a worker waits for the others."""


_TRACED = re.compile(r'File "(?P<file>.+)", line (?P<line>\d+), in (?P<function>.+)')
_ALL_THE_SAME = (
    "all must make the same collective calls in the same order, so none may stand under an `if run.is_main`, say"
)


class Request(Enum):
    """What an engine is asked to do with all of its workers."""

    LOOK = "look"
    """Have them write their stacks."""
    ABORT = "abort"
    """Kill them: they hang."""


class HangWatch:
    """One attempt's workers."""

    def __init__(self, timeout_s: float) -> None:
        """0: no hang is looked for."""
        self._timeout_s = timeout_s
        self._beats: dict[int, tuple[int, float]] = {}
        """Each worker's last change, and when it was seen: clocks of other machines are not compared with ours."""
        self._phases: dict[int, str] = {}
        self._first: dict[int, int] = {}
        """The step at which each worker began."""
        self._longest: dict[str, float] = {}
        self._looked_at: float | None = None
        self._before: dict[int, list[Frame]] | None = None
        self._patience = 1.0
        self.verdict: Verdict | None = None
        """Once it is certain."""
        self.aborted = False

    @property
    def asked(self) -> bool:
        """Whether the workers were asked for their stacks."""
        return self._looked_at is not None

    def look(self, now: float, readings: Mapping[int, Reading], stacks: Mapping[int, list[Frame]]) -> Request | None:
        """`stacks`: what the workers wrote when they were last asked."""
        for rank, reading in readings.items():
            self._note(now, rank, reading)
        if self.verdict is not None or not self._timeout_s or not readings:
            return None
        if not any(self._stands_still(now, rank, reading) for rank, reading in readings.items()):
            self._looked_at = self._before = None
            return None
        if self._looked_at is None:
            self._looked_at = now
            return Request.LOOK
        if now - self._looked_at < max(0.5, self._timeout_s * _NEXT_LOOK):
            return None
        return self._compare(now, readings, dict(stacks))

    def _note(self, now: float, rank: int, reading: Reading) -> None:
        self._first.setdefault(rank, reading.step)
        beats, moment = self._beats.get(rank, (-1, now))
        if beats != reading.beats:
            phase = self._phases.get(rank)
            if phase is not None:
                self._longest[phase] = max(self._longest.get(phase, 0.0), now - moment)
            self._beats[rank], self._phases[rank] = (reading.beats, now), reading.phase

    def _stands_still(self, now: float, rank: int, reading: Reading) -> bool:
        in_loop = reading.phase in _LOOPING and reading.step - self._first[rank] >= _FIRST_STEPS
        limit = self._timeout_s * (1.0 if in_loop else _ELSEWHERE) * self._patience
        limit = max(limit, _USUAL * self._longest.get(reading.phase, 0.0))
        return bool(reading.since) and now - self._beats[rank][1] >= limit

    def _compare(self, now: float, readings: Mapping[int, Reading], stacks: dict[int, list[Frame]]) -> Request | None:
        """Two looks at the stacks: what moves is slow; what does not hangs."""
        before, self._before, self._looked_at = self._before, stacks, now
        if before is None:
            return Request.LOOK
        moves = any(stacks.get(rank) != stack for rank, stack in before.items() if stack)
        if moves or any(map(_is_debugged, stacks.values())):
            self._patience *= 2
            self._looked_at = self._before = None
            return None
        self.verdict = self._judged(now, readings, stacks)
        meeting = any(_waits(stack) for stack in stacks.values())
        self.aborted = meeting or all(reading.phase in _LOOPING for reading in readings.values())
        return Request.ABORT if self.aborted else None

    def _judged(self, now: float, readings: Mapping[int, Reading], stacks: dict[int, list[Frame]]) -> Verdict:
        rank = self._culprit(readings, stacks)
        reading = readings[rank]
        seconds = now - self._beats[rank][1]
        others = [
            f"rank {other} {'waits' if _waits(stacks.get(other, [])) else 'is'} in step {readings[other].step + 1} at "
            f"{where(stacks.get(other, []))}"
            for other in sorted(readings)
            if other != rank
        ]
        text = (
            f"rank {rank} hangs in the {reading.phase} phase of step {reading.step + 1} since {seconds:.0f} s, at "
            f"{where(stacks.get(rank, []))}"
        )
        if others:
            text += "; " + "; ".join(others[:3]) + (f"; and {len(others) - 3} more" if len(others) > 3 else "")
        return Verdict("hang", rank, text, self._advice(readings, stacks), seconds)

    def _culprit(self, readings: Mapping[int, Reading], stacks: dict[int, list[Frame]]) -> int:
        """Who does not wait for the others; where all wait, who is ahead: it has passed the place where they wait."""
        busy = [rank for rank in sorted(readings) if stacks.get(rank) and not _waits(stacks[rank])]
        if busy:
            return busy[0]
        return max(sorted(readings), key=lambda rank: (readings[rank].step, readings[rank].beats))

    def _advice(self, readings: Mapping[int, Reading], stacks: dict[int, list[Frame]]) -> str:
        places = {where(stack) for stack in stacks.values()} | {str(reading.step) for reading in readings.values()}
        if len(readings) > 1 and all(map(_waits, stacks.values())) and len(places) > 2:
            return f"workers wait for each other in different places: {_ALL_THE_SAME}"
        return "the stacks of all workers are in the run's events"


def _is_debugged(stack: list[Frame]) -> bool:
    return any(part in frame.file for frame in stack for part in _DEBUGGERS)


def _waits(stack: list[Frame]) -> bool:
    """Whether a worker is in a collective, or in a backward that ends in one."""
    return any(part in frame.file for frame in stack[:8] for part in _MEETING)


def different_calls(failures: list[WorkerFailure]) -> Verdict:
    """The verdict on workers that did not wait for each other, but failed, for they met in different calls."""
    places = "; ".join(f"rank {failure.rank} {_place(failure)}" for failure in failures)
    step = failures[0].step + 1
    text = f"the workers made different collective calls in step {step}: {places}"
    return Verdict("mismatch", failures[0].rank, text, _ALL_THE_SAME, float(step))


def _place(failure: WorkerFailure) -> str:
    found = _TRACED.search(failure.traceback)
    if found is not None:
        return f"was at {Path(found['file']).name}:{found['line']} in {found['function']}"
    return f"was {failure.message or 'killed'}"
