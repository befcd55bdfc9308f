"""Heartbeats made by hand."""

from __future__ import annotations

from typing import Any

from keepstep.observe.heart import PHASES, Reading, Vitals


def reading(done: int, /, phase: str = "step", beats: int | None = None, noted: int = 0, **fields: Any) -> Reading:
    """`fields`: seconds by phase, and vitals."""
    totals = {name: float(fields.pop(name, 0.0)) for name in PHASES}
    return Reading(done, phase, 1.0, 2 * done if beats is None else beats, noted, Vitals(**fields), totals)
