"""What a worker measures of itself about once a second: memory, and whether the others wait for it."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from keepstep.observe.arrivals import Arrivals
from keepstep.observe.heart import Heart, Vitals

_PAGE_CACHE_FREE = "RssAnon:"
"""Memory that is this process's own; the rest of what is resident belongs to files, and is given back when needed."""


class Examination:
    """Notes a worker's vitals in its heart."""

    def __init__(self, heart: Heart, rank: int, device: torch.device, save_group: dist.ProcessGroup | None) -> None:
        self._heart, self._rank, self._device = heart, rank, device
        self._arrivals = Arrivals(save_group)
        self._process = psutil.Process()

    def step_ended(self) -> None:
        self._arrivals.step_ended()

    def to_compare(self, step_s: float) -> list[float]:
        """What all workers exchange: as many numbers on each. `step_s`: what a step takes."""
        return self._arrivals.recent(step_s)

    def note(self, compared: list[list[float]]) -> None:
        """`compared`: every worker's."""
        used, free = self._device_memory()
        self._heart.note(
            Vitals(
                host_bytes=self._host_memory(),
                host_free=float(psutil.virtual_memory().available),
                device_bytes=used,
                device_free=free,
                lateness=self._arrivals.compare(compared)[self._rank],
            )
        )

    def _host_memory(self) -> float:
        if sys.platform != "linux":
            return float(self._process.memory_info().rss)
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(_PAGE_CACHE_FREE):
                return 1024.0 * float(line.split()[1])
        return math.nan

    def _device_memory(self) -> tuple[float, float]:
        if self._device.type != "cuda":
            return math.nan, math.nan
        used = float(torch.cuda.memory_allocated(self._device))
        return used, torch.cuda.get_device_properties(self._device).total_memory - used
