"""When workers arrived where they meet: who is always last makes all others wait.

torch's flight recorder notes the time of every collective call, for gloo and NCCL alike, at no cost to speak of.
Durations would not do: a step takes equally long on all workers, whoever is slow.
"""

from __future__ import annotations

import math
import os
import pickle
import time
import zlib
from bisect import bisect
from collections import deque
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch.distributed as dist

_KEPT = 160
"""Calls that torch remembers: reading them takes time in proportion, 10 µs each."""
_PAUSE = 3
"""Of four meetings one is looked at, which costs a quarter, until somebody is late."""
_NOTABLE = 0.1
"""Share of the time that the others waited for a worker, from which on every meeting is looked at."""
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
        self._runs: list[int] = []
        """Which of the newest calls form one meeting: equal numbers."""
        self._pause = 0
        """How many exchanges are passed over; the same on all workers."""

    def step_ended(self) -> None:
        self._ended.append(time.time_ns())

    def recent(self, step_s: float) -> list[float]:
        """What was called since the last time, as a number, how often, and when: to be compared with the others'.

        `step_s`: what a step takes. Less than one says nothing: a worker is late in one place of it.
        """
        if self._pause:
            return _UNKNOWN
        calls = self._calls() if self._works else []
        fresh = [call for call in calls if call["record_id"] > self._read][-_COMPARED:]
        self._read = calls[-1]["record_id"] if calls else -1
        times = [call["time_created_ns"] * 1e-9 for call in fresh]
        if len(times) < 2 or times[-1] - times[0] < 0.8 * step_s:
            return _UNKNOWN
        kinds = [call["profiling_name"].rpartition(":")[2] for call in fresh]
        steps = [bisect(self._ended, call["time_created_ns"]) for call in fresh]
        self._runs = number_runs(list(zip(steps, kinds, strict=True)))
        called = [(call["process_group"][0], call["collective_seq_id"]) for call in fresh]
        what = zlib.crc32(repr((kinds, called)).encode())
        return [float(what), float(len(times)), *times, *[0.0] * (_COMPARED - len(times))]

    def compare(self, rows: list[list[float]]) -> list[float]:
        """How late each worker was, from all workers' `recent`; NaN: not known."""
        if self._pause:
            self._pause -= 1
            return [math.nan] * len(rows)
        late = lateness(rows, self._runs)
        self._pause = 0 if any(share >= _NOTABLE for share in late) else _PAUSE
        return late

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
    times = np.array(rows)[:, 2 : 2 + int(rows[0][1])]
    # The first call only starts the clock: how late it was belongs to the time before.
    gaps = np.maximum(0.0, times - median_of_others(times))[:, 1:]
    begins = [n for n in range(len(runs) - 1) if n == 0 or runs[n + 1] != runs[n]]
    waited = np.maximum.reduceat(gaps, begins, axis=1).sum(axis=1)
    return list(waited / np.maximum(times[:, -1] - times[:, 0], 1e-9))


def median_of_others(times: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Of each column, for every row the median of the other rows."""
    ordered, place = np.sort(times, axis=0), times.argsort(axis=0).argsort(axis=0)
    middle = [(len(times) - 2) // 2, (len(times) - 1) // 2]
    medians: npt.NDArray[np.float64] = np.mean(
        [np.where(place > n, ordered[n], ordered[n + 1]) for n in middle], axis=0
    )
    return medians
