"""A worker's heartbeat: which step and phase it is in and where its time went, in memory that outlives its death."""

from __future__ import annotations

import math
import mmap
import os
import time
from dataclasses import dataclass
from pathlib import Path

PHASES = ("start", "data", "transfer", "step", "replay", "checkpoint", "validation", "idle")
"""Where a worker's time goes. start: until the first batch. data: waiting for a batch. transfer: copying it to the
device. step: the loop's body, new work. replay: the body again, for steps that were lost. checkpoint: blocked by
saving. validation: passes over a loader outside of `run.steps`. idle: the rest, in which nothing is trained."""

START, DATA, TRANSFER, STEP, REPLAY, CHECKPOINT, VALIDATION, IDLE = range(len(PHASES))


@dataclass(frozen=True)
class Vitals:
    """What a worker measures of itself about once a second; NaN: not known."""

    host_bytes: float = math.nan
    host_free: float = math.nan
    """What its machine, or its container, has left."""
    device_bytes: float = math.nan
    device_free: float = math.nan
    lateness: float = math.nan
    """The share of the time that the other workers waited for this one, where they meet."""


_STEP, _PHASE, _SINCE, _STOP, _PID, _BEATS, _NOTED, _VITALS = range(8)
_TOTALS = _VITALS + len(Vitals.__dataclass_fields__)
_SIZE = 8 * (_TOTALS + len(PHASES))


class Heart:
    """A few numbers in a mapped file: written by the worker, at no cost to speak of; read by the supervisor, even
    after a SIGKILL, to say where the worker died; the stop flag goes the other way."""

    def __init__(self, path: Path | None, started: float | None = None) -> None:
        """`started`: when the worker was launched, on the clock of `time.time`."""
        if path is None:
            self._cells = memoryview(bytearray(_SIZE)).cast("d")
        else:
            self._cells = _mapped(path)
        for cell in range(len(self._cells)):
            if cell != _STOP:
                self._cells[cell] = 0.0
        self._cells[_SINCE] = time.time() if started is None else started
        self._cells[_PID] = os.getpid()
        self._offset = time.time() - time.perf_counter()

    def enter(self, phase: int) -> None:
        """Leaves the current phase for another. Hot path: twice a step."""
        cells = self._cells
        now = time.perf_counter() + self._offset
        cells[_TOTALS + int(cells[_PHASE])] += now - cells[_SINCE]
        cells[_PHASE] = phase
        cells[_SINCE] = now
        cells[_BEATS] += 1.0

    def beat(self, step: int) -> None:
        self._cells[_STEP] = step

    def note(self, vitals: Vitals) -> None:
        for number, value in enumerate(vars(vitals).values()):
            self._cells[_VITALS + number] = value
        self._cells[_NOTED] += 1.0

    @property
    def phase(self) -> int:
        return int(self._cells[_PHASE])

    @property
    def asked_to_stop(self) -> bool:
        return self._cells[_STOP] != 0.0

    def totals(self) -> dict[str, float]:
        """Seconds by phase, until now."""
        self.enter(int(self._cells[_PHASE]))
        return {name: self._cells[_TOTALS + number] for number, name in enumerate(PHASES)}


@dataclass(frozen=True)
class Reading:
    """A heartbeat at one moment."""

    step: int
    phase: str
    since: float
    """When it entered this phase, on the clock of `time.time`; 0: there is no worker yet."""
    beats: int
    """How often it has changed its phase: it does while it lives."""
    noted: int
    """How often it has measured its vitals."""
    vitals: Vitals
    totals: dict[str, float]
    """Seconds by phase, the one under way counted until now."""


class Pulse:
    """The supervisor's end of a worker's heartbeat."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._cells = _mapped(path)

    @property
    def step(self) -> int:
        return int(self._cells[_STEP])

    @property
    def phase(self) -> str:
        return PHASES[int(self._cells[_PHASE])]

    @property
    def pid(self) -> int:
        """The worker's process, on its own machine; 0: there is none yet."""
        return int(self._cells[_PID])

    @property
    def stack_file(self) -> Path:
        """Where the worker's stacks are written when they are asked for."""
        return stack_file(self._path)

    def totals(self, until: float | None = None) -> dict[str, float]:
        """Seconds by phase, the one under way counted until now, or until then."""
        totals = {name: self._cells[_TOTALS + number] for number, name in enumerate(PHASES)}
        if self._cells[_SINCE]:
            totals[self.phase] += max(0.0, (until or time.time()) - self._cells[_SINCE])
        return totals

    def read(self) -> Reading:
        cells = self._cells
        return Reading(
            step=self.step,
            phase=self.phase,
            since=cells[_SINCE],
            beats=int(cells[_BEATS]),
            noted=int(cells[_NOTED]),
            vitals=Vitals(*cells[_VITALS:_TOTALS]),
            totals=self.totals(),
        )

    def reset(self) -> None:
        for cell in range(len(self._cells)):
            self._cells[cell] = 0.0
        self.stack_file.unlink(missing_ok=True)

    def ask_to_stop(self) -> None:
        self._cells[_STOP] = 1.0

    def follow(self, record: bytes) -> None:
        """Takes over another machine's heartbeat and stacks; the stop flag, which goes the other way, stays."""
        for cell, value in enumerate(memoryview(record[:_SIZE]).cast("d")):
            if cell != _STOP:
                self._cells[cell] = value
        if len(record) > _SIZE:
            self.stack_file.write_bytes(record[_SIZE:])


def stack_file(heart: Path) -> Path:
    return heart.with_name(f"stack_{heart.name}")


def heart_record(path: Path) -> bytes:
    """A heartbeat and the stacks beside it, for `Pulse.follow` on another machine."""
    if not path.exists():
        return b""
    stacks = stack_file(path)
    return path.read_bytes() + (stacks.read_bytes() if stacks.exists() else b"")


def _mapped(path: Path) -> memoryview[float]:
    with path.open("a+b") as file:
        file.truncate(_SIZE)
        return memoryview(mmap.mmap(file.fileno(), _SIZE)).cast("d")
