"""Bytes that each GPU holds for weights, gradients and Adam's two moments."""

from __future__ import annotations

import math

STAGES = {"ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3}


def split(strategy: str, mixed: bool) -> tuple[int, int]:
    """Bytes per parameter that every GPU holds, and those that are divided."""
    weights, gradients, optimizer = (2, 2, 12) if mixed else (4, 4, 8)
    stage = STAGES[strategy]
    divided = optimizer * (stage >= 1) + gradients * (stage >= 2) + weights * (stage >= 3)
    return weights + gradients + optimizer - divided, divided


def bytes_per_gpu(num_parameters: int, num_gpus: int, strategy: str, mixed: bool = False) -> float:
    whole, divided = split(strategy, mixed)
    return num_parameters * (whole + divided / num_gpus)


def gpus_needed(num_parameters: int, gpu_bytes: float, strategy: str, mixed: bool = False) -> int | None:
    whole, divided = split(strategy, mixed)
    room = gpu_bytes - num_parameters * whole
    if divided == 0:
        return 1 if room >= 0 else None
    return math.ceil(num_parameters * divided / room) if room > 0 else None
