"""Verdicts in words from the workers' heartbeats: who waits for data, who is late, whose memory grows, what got slow.

Pure: it is given readings and the time, and never looks at a clock or a process itself.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from keepstep.observe.heart import Reading

_TRAINING = ("data", "transfer", "step", "replay")
_WARM_UP_STEPS = 10
"""The first steps compile kernels and fill caches: they say nothing about the rest."""
_WARM_UP_S = 3.0
_WINDOW_S = 10.0
_LEAST_S = 4.0
_LEAST_STEPS = 10
_STALLED = 0.3
"""Share of the training time that goes into waiting for data, from which on it is worth a word."""
_LATE = 0.2
"""Share of the time that the others wait for a worker: 1.25 times as slow as they are."""
_LATE_SAMPLES = 4
_GROWN_BYTES = 64 * 2**20
_GROWN_SHARE = 0.05
_GROWTH_SAMPLES = 8
_GROWTH_STEPS = 300
"""Where batches differ in shape, an allocator's blocks grow in a straight line for a hundred steps, then no more: so
many are waited for, if memory lasts so long."""
_SLOWER = 2.0


@dataclass(frozen=True)
class Verdict:
    """What is wrong, in words, with the figure that shows it and what to do."""

    kind: str
    """stall, straggler, hang, mismatch, leak, loss, or slowdown."""
    rank: int | None
    """None: all of them."""
    text: str
    advice: str
    figure: float

    def __str__(self) -> str:
        return f"{self.text}; {self.advice}"


@dataclass(frozen=True)
class _Sample:
    moment: float
    reading: Reading

    def since(self, earlier: _Sample, *phases: str) -> float:
        """Seconds in these phases between two samples."""
        now, then = self.reading.totals, earlier.reading.totals
        return sum(now[phase] - then[phase] for phase in phases)


class _Growth:
    """Memory over the steps: a straight line upwards is a leak, a curve that flattens is a cache that fills."""

    def __init__(self) -> None:
        self.samples: list[tuple[float, float, float]] = []
        """Time, step, bytes; thinned out as they become many, so that they always span the attempt."""

    def add(self, moment: float, step: int, size: float) -> None:
        self.samples.append((moment, step, size))
        if len(self.samples) >= 256:
            del self.samples[1::2]

    def slope(self, free: float) -> tuple[float, float] | None:
        """Bytes a second and bytes a step, if it grows steadily; `free`: what it may still take."""
        if len(self.samples) < _GROWTH_SAMPLES:
            return None
        sizes = [size for _, _, size in self.samples]
        grown, steps = sizes[-1] - sizes[0], self.samples[-1][1] - self.samples[0][1]
        if grown < max(_GROWN_BYTES, _GROWN_SHARE * sizes[0]):
            return None
        if steps < _GROWTH_STEPS and grown * (_GROWTH_STEPS - steps) < free * steps:
            return None
        moments = [moment for moment, _, _ in self.samples]
        middle = next(n for n, moment in enumerate(moments) if moment >= (moments[0] + moments[-1]) / 2)
        rises = sum(later > earlier for earlier, later in pairwise(sizes))
        if sizes[-1] - sizes[middle] < 0.3 * grown or rises < 0.6 * (len(sizes) - 1):
            return None
        return grown / (moments[-1] - moments[0]), grown / max(1.0, steps)


class Health:
    """One attempt's workers, watched through their heartbeats; each verdict is given once."""

    def __init__(self) -> None:
        self._history: dict[int, deque[_Sample]] = {}
        self._begun: dict[int, tuple[float, int]] = {}
        """When each worker was first seen to train, and at which step."""
        self._late: dict[int, deque[float]] = {}
        self._growth: dict[tuple[int, str], _Growth] = {}
        self._noted: dict[int, int] = {}
        self._best: dict[str, float] = {}
        """Seconds a step by phase, when steps were at their fastest."""
        self._said: set[tuple[str, int | None]] = set()

    def look(self, now: float, readings: dict[int, Reading]) -> list[Verdict]:
        """What there is to say, about twice a second."""
        for rank, reading in readings.items():
            self._remember(now, rank, reading)
        verdicts = [*self._stragglers(), *self._stalls(), *self._leaks(), *self._slowdowns()]
        fresh = [verdict for verdict in verdicts if (verdict.kind, verdict.rank) not in self._said]
        self._said.update((verdict.kind, verdict.rank) for verdict in fresh)
        return fresh

    def _remember(self, now: float, rank: int, reading: Reading) -> None:
        if reading.phase == "start" or not reading.since:
            return
        begun, first = self._begun.setdefault(rank, (now, reading.step))
        if now - begun < _WARM_UP_S or reading.step - first < _WARM_UP_STEPS:
            return
        history = self._history.setdefault(rank, deque())
        history.append(_Sample(now, reading))
        while now - history[0].moment > _WINDOW_S:
            history.popleft()
        if reading.noted != self._noted.get(rank):
            self._noted[rank] = reading.noted
            self._examine(now, rank, reading)

    def _examine(self, now: float, rank: int, reading: Reading) -> None:
        vitals = reading.vitals
        if not math.isnan(vitals.lateness):
            self._late.setdefault(rank, deque(maxlen=2 * _LATE_SAMPLES)).append(vitals.lateness)
        for place, size in (("host", vitals.host_bytes), ("device", vitals.device_bytes)):
            if not math.isnan(size):
                self._growth.setdefault((rank, place), _Growth()).add(now, reading.step, size)

    def _windows(self) -> Iterator[tuple[int, _Sample, _Sample]]:
        """For each worker that has made enough steps lately: its oldest and newest sample."""
        for rank, history in sorted(self._history.items()):
            first, last = history[0], history[-1]
            made = last.reading.step - first.reading.step
            if last.moment - first.moment >= _LEAST_S and made >= _LEAST_STEPS:
                yield rank, first, last

    # -- the rules ----------------------------------------------------------------------------------------------------

    def _stalls(self) -> Iterator[Verdict]:
        shares = {rank: _share(first, last, "data") for rank, first, last in self._windows()}
        if not shares or len(shares) < len(self._history) or min(shares.values()) < _STALLED / 2:
            return  # one that waits alone makes the others wait for it: a straggler
        share = statistics.median(shares.values())
        if share >= _STALLED:
            yield Verdict(
                "stall",
                None,
                f"input-bound: {share:.0%} of the step time is spent waiting for data",
                "raise num_workers of the DataLoader, or the CPUs of a Ray data set, or make loading a sample cheaper",
                share,
            )

    def _stragglers(self) -> Iterator[Verdict]:
        known = {rank: late for rank, late in self._late.items() if len(late) >= _LATE_SAMPLES}
        if len(known) < 2 or min(len(known), len(list(self._windows()))) < len(self._history):
            return
        medians = {rank: statistics.median(late) for rank, late in known.items()}
        rank, late = max(medians.items(), key=lambda item: item[1])
        rest = max(value for other, value in medians.items() if other != rank)
        # Workers that take turns in being late are uneven work, or a busy machine, not one that is slow.
        if late < _LATE or rest > late / 3 or min(known[rank]) < late / 3:
            return
        phase = self._phase_of(rank)
        yield Verdict(
            "straggler",
            rank,
            f"rank {rank} is a straggler, {1 / (1 - min(late, 0.95)):.1f} times the median: the others wait for it "
            f"{late:.0%} of the time, and it loses it in the {phase} phase",
            f"look at its machine, and at what its {'data' if phase == 'data' else 'part of the batch'} makes it do",
            late,
        )

    def _phase_of(self, rank: int) -> str:
        """In which phase a worker that is late loses its time: the one in which it is slower than the others."""
        shares = {other: _share(first, last, "data") for other, first, last in self._windows()}
        rest = [share for other, share in shares.items() if other != rank]
        return "data" if rest and shares.get(rank, 0.0) - statistics.median(rest) > _LATE / 2 else "step"

    def _leaks(self) -> Iterator[Verdict]:
        for (rank, place), growth in sorted(self._growth.items()):
            vitals = self._history[rank][-1].reading.vitals
            free = vitals.host_free if place == "host" else vitals.device_free
            # All workers may be on one machine, and all may leak.
            slope = growth.slope(free / len(self._history) if place == "host" else free)
            if slope is None:
                continue
            by_second, by_step = slope
            left = free / by_second
            yield Verdict(
                "leak",
                rank,
                f"{place} memory of rank {rank} grows {_size(by_step)} a step, steadily; at this rate the "
                f"{_size(free)} that are free last {_duration(left)}",
                "something keeps what each step makes: a list of losses with their graphs, a cache without a limit",
                by_step,
            )

    def _slowdowns(self) -> Iterator[Verdict]:
        windows = list(self._windows())
        if not windows:
            return
        _, first, last = windows[0]
        if last.moment - first.moment < 0.9 * _WINDOW_S:
            return
        steps = last.reading.step - first.reading.step
        now, best = {phase: last.since(first, phase) / steps for phase in _TRAINING}, self._best
        step_s, best_s = sum(now.values()), sum(best.values()) if best else math.inf
        if step_s > _SLOWER * best_s:
            slow = max(_TRAINING, key=lambda phase: now[phase] - best[phase])
            yield Verdict(
                "slowdown",
                None,
                f"steps take {step_s * 1e3:.0f} ms, {step_s / best_s:.1f} times as long as earlier in "
                f"this run; most of it in the {slow} phase",
                "see whether something else runs on the machine, or the GPU has become hot",
                step_s / best_s,
            )
        elif step_s < best_s:
            self._best = now


def _share(first: _Sample, last: _Sample, phase: str) -> float:
    return last.since(first, phase) / max(last.since(first, *_TRAINING), 1e-9)


def _size(number: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6)):
        if number >= scale:
            return f"{number / scale:.3g} {unit}"
    return f"{number / 1e3:.3g} kB"


def _duration(seconds: float) -> str:
    for unit, scale in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * scale:
            return f"{seconds / scale:.0f} {unit}"
    return f"{seconds:.0f} seconds"
