"""When workers arrived where they meet: who is always last makes all others wait.

torch's flight recorder notes the time of every collective call, for gloo and NCCL alike, at no cost to speak of.
Durations would not do: a step takes equally long on all workers, whoever is slow.
"""

from __future__ import annotations

import math
import os
import pickle
import statistics
import zlib
from typing import Any

import torch.distributed as dist

_KEPT = 24
"""Calls that torch remembers: reading them takes time in proportion."""
_COMPARED = 16
_BUFFER = "TORCH_FR_BUFFER_SIZE"
NUM_FLOATS = 1 + _COMPARED
"""How many numbers `recent` has."""


def remember_arrivals() -> None:
    """To be called before the process group is made."""
    os.environ.setdefault(_BUFFER, str(_KEPT))


class Arrivals:
    """This worker's newest arrivals."""

    def __init__(self, save_group: dist.ProcessGroup | None) -> None:
        """`save_group`: what is called beside training, in another order on every worker."""
        self._passed_over = save_group.group_name if save_group is not None else None
        # One whose user wants to keep thousands of calls is too slow to look at once a second.
        size = os.environ.get(_BUFFER, "")
        self._works = save_group is not None and size.isdigit() and int(size) <= 8 * _KEPT

    def recent(self) -> list[float]:
        """What was called, as a number, and when: to be compared with what the other workers have."""
        calls = self._calls()[-_COMPARED:] if self._works else []
        if len(calls) < _COMPARED:
            return [math.nan] * NUM_FLOATS
        what = repr([(call["process_group"][0], call["collective_seq_id"]) for call in calls])
        return [float(zlib.crc32(what.encode())), *(call["time_created_ns"] * 1e-9 for call in calls)]

    def _calls(self) -> list[dict[str, Any]]:
        try:
            from torch._C._distributed_c10d import _dump_fr_trace  # type: ignore[attr-defined]

            # Our own process's memory, not somebody's file.
            record = pickle.loads(_dump_fr_trace(True, False, False))
            return [
                call
                for call in record["entries"]
                if not call["is_p2p"] and call["process_group"][0] != self._passed_over
            ]
        except (ImportError, TypeError, KeyError, RuntimeError):  # another torch
            self._works = False
            return []


def lateness(rows: list[list[float]]) -> list[float]:
    """Each worker's share of the time that the others waited for it, from all workers' `recent`; NaN: not known."""
    if len(rows) < 2 or any(row[0] != rows[0][0] for row in rows):  # NaN differs from itself
        return [math.nan] * len(rows)
    times = [row[1:] for row in rows]
    spans = [own[-1] - own[0] for own in times]
    return [_late(rank, times) / max(spans[rank], 1e-9) for rank in range(len(rows))]


def _late(rank: int, times: list[list[float]]) -> float:
    others = [own for number, own in enumerate(times) if number != rank]
    # The first call only starts the clock: how late it was belongs to the time before.
    gaps = (times[rank][n] - statistics.median(own[n] for own in others) for n in range(1, _COMPARED))
    return sum(max(0.0, gap) for gap in gaps)
