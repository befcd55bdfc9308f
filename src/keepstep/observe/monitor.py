"""Watches an attempt from outside: reads heartbeats, stacks and metrics, and passes on what there is to say."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from keepstep.observe.hang import HangWatch, Request
from keepstep.observe.health import Health, Verdict
from keepstep.observe.heart import Pulse
from keepstep.observe.loss import LossWatch
from keepstep.observe.stacks import Frame, stack_of

_LOOK_S = 0.5


class Monitor:
    """One attempt."""

    def __init__(
        self, hearts: Path, hang_timeout_s: float, say: Callable[[Verdict, dict[int, list[str]]], None]
    ) -> None:
        """`say` gets each verdict once, with the workers' stacks where they belong to it."""
        self._hearts, self._say = hearts, say
        self._health, self._loss, self._hang = Health(), LossWatch(), HangWatch(hang_timeout_s)
        self._next = 0.0
        self._pulses: dict[int, Pulse] = {}

    @property
    def hang(self) -> Verdict | None:
        """Why the workers were killed, if it was for that."""
        return self._hang.verdict if self._hang.aborted else None

    def look(self, metrics: list[dict[str, Any]]) -> Request | None:
        """Called often; `metrics`: the lines that are new."""
        for verdict in self._loss.look(metrics):
            self._say(verdict, {})
        now = time.monotonic()
        if now < self._next:
            return None
        self._next = now + _LOOK_S
        for path in self._hearts.glob("rank_*"):
            self._pulses.setdefault(int(path.name.removeprefix("rank_")), Pulse(path))
        readings = {rank: pulse.read() for rank, pulse in self._pulses.items()}
        readings = {rank: reading for rank, reading in readings.items() if reading.since}
        for verdict in self._health.look(now, readings):
            self._say(verdict, {})
        known = self._hang.verdict
        stacks = self._stacks() if self._hang.asked else {}
        request = self._hang.look(now, readings, stacks)
        if self._hang.verdict is not None and known is None:
            self._say(self._hang.verdict, {rank: [str(frame) for frame in stack] for rank, stack in stacks.items()})
        return request

    def _stacks(self) -> dict[int, list[Frame]]:
        return {rank: stack_of(pulse) for rank, pulse in self._pulses.items()}
