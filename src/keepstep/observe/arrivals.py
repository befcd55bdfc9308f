"""When workers arrived where they meet: who is always last makes all others wait.

torch's flight recorder notes the time of every collective call, for gloo and NCCL alike, at no cost to speak of.
Durations would not do: a step takes equally long on all workers, whoever is slow.
"""

from __future__ import annotations

import math
import os
import pickle
import statistics
import time
import zlib
from bisect import bisect
from collections import deque
from itertools import pairwise
from typing import Any

import torch.distributed as dist

_KEPT = 160
"""Calls that torch remembers: reading them takes time in proportion, 5 µs each."""
_COMPARED = 128
"""At most: a step of FSDP2 with 40 blocks."""
_BUFFER = "TORCH_FR_BUFFER_SIZE"
_NOT_WAITED_FOR = ("all_reduce", "broadcast")
"""Calls after which a worker may go on at once: as gradients are averaged in backward, one comes after the other, and
who is late for the first is as late for all of them."""
NUM_FLOATS = 2 + _COMPARED
"""How many numbers `recent` has."""
_UNKNOWN = [math.nan] * NUM_FLOATS


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
        self._works = save_group is not None and size.isdigit() and int(size) <= 2 * _KEPT
        self._read = -1
        """The number of the newest call that was read."""
        self._ended: deque[int] = deque(maxlen=_KEPT)
        """When the newest steps ended, in nanoseconds."""
        self.runs: list[int] = []
        """Which of the newest calls form one meeting: equal numbers."""

    def step_ended(self) -> None:
        self._ended.append(time.time_ns())

    def recent(self, step_s: float) -> list[float]:
        """What was called since the last time, as a number, how often, and when: to be compared with the others'.

        `step_s`: what a step takes. Less than one says nothing: a worker is late in one place of it.
        """
        calls = self._calls() if self._works else []
        fresh = [call for call in calls if call["record_id"] > self._read][-_COMPARED:]
        self._read = calls[-1]["record_id"] if calls else -1
        times = [call["time_created_ns"] * 1e-9 for call in fresh]
        if len(times) < 2 or times[-1] - times[0] < 0.8 * step_s:
            return _UNKNOWN
        kinds = [call["profiling_name"].rpartition(":")[2] for call in fresh]
        steps = [bisect(self._ended, call["time_created_ns"]) for call in fresh]
        self.runs = number_runs(list(zip(steps, kinds, strict=True)))
        called = [(call["process_group"][0], call["collective_seq_id"]) for call in fresh]
        what = zlib.crc32(repr((kinds, called)).encode())
        return [float(what), float(len(times)), *times, *[0.0] * (_COMPARED - len(times))]

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


def number_runs(calls: list[tuple[int, str]]) -> list[int]:
    """Equal numbers for calls, each a step and a kind, that are one meeting."""
    runs = [0]
    for before, call in pairwise(calls):
        runs.append(runs[-1] + (call != before or call[1] not in _NOT_WAITED_FOR))
    return runs


def lateness(rows: list[list[float]], runs: list[int]) -> list[float]:
    """Each worker's share of the time that the others waited for it, from all workers' `recent`; NaN: not known."""
    if len(rows) < 2 or any(row[:2] != rows[0][:2] for row in rows):  # NaN differs from itself
        return [math.nan] * len(rows)
    times = [row[2 : 2 + int(row[1])] for row in rows]
    spans = [own[-1] - own[0] for own in times]
    return [_late(rank, times, runs) / max(spans[rank], 1e-9) for rank in range(len(rows))]


def _late(rank: int, times: list[list[float]], runs: list[int]) -> float:
    others = [own for number, own in enumerate(times) if number != rank]
    waited: dict[int, float] = {}
    for n, run in enumerate(runs):
        if n > 0:  # the first call only starts the clock: how late it was belongs to the time before
            gap = times[rank][n] - statistics.median(own[n] for own in others)
            waited[run] = max(gap, waited.get(run, 0.0))
    return sum(waited.values())
