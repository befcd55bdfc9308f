"""A worker's heartbeat: which step and phase it is in and where its time went, in memory that outlives its death."""

from __future__ import annotations

import mmap
import time
from pathlib import Path

PHASES = ("start", "data", "step", "replay", "checkpoint", "other")
"""Where a worker's time goes. start: until the first batch. data: waiting for a batch. step: the loop's body, new work.
replay: the body again, for steps that were lost. checkpoint: blocked by saving. other: validation and the rest."""

_STEP, _PHASE, _SINCE, _STOP, _TOTALS = 0, 1, 2, 3, 4
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
        self._offset = time.time() - time.perf_counter()

    def enter(self, phase: int) -> None:
        """Leaves the current phase for another. Hot path: twice a step."""
        cells = self._cells
        now = time.perf_counter() + self._offset
        cells[_TOTALS + int(cells[_PHASE])] += now - cells[_SINCE]
        cells[_PHASE] = phase
        cells[_SINCE] = now

    def beat(self, step: int) -> None:
        self._cells[_STEP] = step

    @property
    def asked_to_stop(self) -> bool:
        return self._cells[_STOP] != 0.0

    def totals(self) -> dict[str, float]:
        """Seconds by phase, until now."""
        self.enter(int(self._cells[_PHASE]))
        return {name: self._cells[_TOTALS + number] for number, name in enumerate(PHASES)}


START, DATA, STEP, REPLAY, CHECKPOINT, OTHER = range(len(PHASES))


class Pulse:
    """The supervisor's end of a worker's heartbeat."""

    def __init__(self, path: Path) -> None:
        self._cells = _mapped(path)

    @property
    def step(self) -> int:
        return int(self._cells[_STEP])

    @property
    def phase(self) -> str:
        return PHASES[int(self._cells[_PHASE])]

    def totals(self) -> dict[str, float]:
        """Seconds by phase, the one under way counted until now."""
        totals = {name: self._cells[_TOTALS + number] for number, name in enumerate(PHASES)}
        if self._cells[_SINCE]:
            totals[self.phase] += max(0.0, time.time() - self._cells[_SINCE])
        return totals

    def reset(self) -> None:
        for cell in range(len(self._cells)):
            self._cells[cell] = 0.0

    def ask_to_stop(self) -> None:
        self._cells[_STOP] = 1.0

    def follow(self, pulse: bytes) -> None:
        """Takes over another machine's heartbeat; the stop flag, which goes the other way, stays."""
        for cell, value in enumerate(memoryview(pulse).cast("d")):
            if cell != _STOP:
                self._cells[cell] = value


def _mapped(path: Path) -> memoryview[float]:
    with path.open("a+b") as file:
        file.truncate(_SIZE)
        return memoryview(mmap.mmap(file.fileno(), _SIZE)).cast("d")
