"""What workers exchange about once a second: metrics, requests to stop, whether to save, and how they are."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from keepstep.context import Context
from keepstep.observe.heart import Heart
from keepstep.observe.metrics import Metrics
from keepstep.observe.vitals import Examination

_INTERVAL_S = 1.0


class Agreed(NamedTuple):
    """The same on all workers."""

    lines: list[dict[str, Any]]
    """What was logged since the last time, reduced."""
    stop: bool
    save: bool


class Exchange:
    """One worker's part in it. Often enough to be told in time, rare enough to cost nothing (docs/adr/0002)."""

    def __init__(self, context: Context, heart: Heart) -> None:
        self.metrics = Metrics(context.collective)
        self._vitals = Examination(heart, context.rank, context.device, context.save_group)
        self._next, self._moment, self._step = 1, time.perf_counter(), 0

    def step_ended(self, step: int) -> bool:
        """Whether it is time to meet."""
        self._vitals.step_ended()
        return step >= self._next

    def resume(self, step: int) -> None:
        self._next, self._step = step + 1, step

    def meet(self, step: int, stop: bool, save: bool) -> Agreed:
        """Any worker may ask to stop; rank 0's clock says when to save. Collective."""
        step_s = (time.perf_counter() - self._moment) / max(1, step - self._step)
        interval = min(max(1, round(_INTERVAL_S / max(step_s, 1e-6))), 2 * max(1, step))
        mine = [float(stop), float(save), float(interval), *self._vitals.to_compare(step_s)]
        lines, rows = self.metrics.reduce(mine)
        self._vitals.note([row[3:] for row in rows])
        self._next = step + int(rows[0][2])
        self._moment, self._step = time.perf_counter(), step
        return Agreed(lines, any(row[0] for row in rows), bool(rows[0][1]))
