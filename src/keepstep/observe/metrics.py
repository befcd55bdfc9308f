"""Metrics of the whole global batch: collected without waiting for the GPU, reduced over the workers now and then."""

from __future__ import annotations

import contextlib
import math
import os
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from keepstep.collective import Collective
from keepstep.errors import LoopError
from keepstep.standard_json import to_json

Number = float | torch.Tensor


@dataclass(slots=True)
class Record:
    """What was logged in one step, or between two."""

    step: int
    epoch: int
    weight: float
    """Samples of this worker that the values are means over; 1 between steps."""
    in_step: bool
    values: dict[str, Number] = field(default_factory=dict)


class Metrics:
    """Logged values that wait to be reduced. Logging copies tensors where they are: reading one would stop the GPU."""

    def __init__(self, collective: Collective) -> None:
        self._collective = collective
        self._pending: list[Record] = []
        self.latest: dict[str, float] = {}
        """The newest reduced value of every metric ever logged."""

    def log(self, record: Record, values: dict[str, Any], part: float | None) -> None:
        """Adds to the record of that step. `part`: this is one of several parts of a batch, with this share of it."""
        pending = self._pending
        if pending and pending[-1].step == record.step and pending[-1].in_step == record.in_step:
            record = pending[-1]
        else:
            pending.append(record)
        for name, value in values.items():
            checked = _number(name, value)
            record.values[name] = checked if part is None else record.values.get(name, 0.0) + checked * part

    def reduce(self, flags: list[float]) -> tuple[list[dict[str, Any]], list[list[float]]]:
        """The records since the last call, reduced, and every worker's `flags`, in one exchange; collective."""
        pending, self._pending = self._pending, []
        shape = [(record.step, record.in_step, *record.values) for record in pending]
        signature = float(zlib.crc32(repr(shape).encode()))
        rows = self._collective.rows([signature, *flags])
        if all(row[0] == signature for row in rows):
            reduced = self._reduce_alike(pending)
        else:
            reduced = self._reduce_unlike(pending)
        for line in reduced:
            self.latest.update({name: value for name, value in line.items() if name not in ("step", "epoch")})
        return reduced, [row[1:] for row in rows]

    def _reduce_alike(self, pending: list[Record]) -> list[dict[str, Any]]:
        values = _to_host([value for record in pending for value in record.values.values()])
        weights = torch.tensor([r.weight for r in pending for _ in r.values], dtype=torch.float64)
        if not self._collective.alone and len(values):
            weighted = torch.where(weights > 0, values * weights, 0.0)
            total = self._collective.sum_on_host(torch.stack([weighted, weights]))
            values = total[0] / total[1]
        flat = iter(values.tolist())
        return [
            {"step": record.step, "epoch": record.epoch, **{name: next(flat) for name in record.values}}
            for record in pending
        ]

    def _reduce_unlike(self, pending: list[Record]) -> list[dict[str, Any]]:
        """Workers logged different things (`if run.is_main: run.log(...)`): averaged over those that did."""
        mine = []
        for record in pending:
            numbers = _to_host(list(record.values.values())).tolist()
            values = dict(zip(record.values, numbers, strict=True))
            mine.append(((record.step, not record.in_step), record.epoch, record.weight, values))
        sums: dict[tuple[int, bool], tuple[int, dict[str, list[float]]]] = {}
        for rank in self._collective.objects(mine):
            for place, epoch, weight, values in rank:
                _, line = sums.setdefault(place, (epoch, {}))
                for name, value in values.items():
                    total = line.setdefault(name, [0.0, 0.0])
                    total[0] += value * weight if weight else 0.0
                    total[1] += weight
        return [
            {"step": place[0], "epoch": epoch, **{name: t / w if w else math.nan for name, (t, w) in line.items()}}
            for place, (epoch, line) in sorted(sums.items())
        ]


class MetricsFile:
    """metrics.jsonl, cut back to where a checkpoint was taken when the run resumes from it."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a+")

    def write(self, lines: list[dict[str, Any]]) -> None:
        if lines:
            self._file.write("".join(to_json(line) + "\n" for line in lines))
            self._file.flush()

    def position(self) -> int:
        """Bytes so far, on the disk: a checkpoint must not know of lines that a crash can lose."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return os.fstat(self._file.fileno()).st_size

    def cut(self, position: int) -> None:
        self._file.flush()
        size = os.fstat(self._file.fileno()).st_size
        self._file.truncate(min(position, size))  # beyond the end it would fill in zeros

    def close(self) -> None:
        with contextlib.suppress(OSError):  # of a write that has failed before, and was told then
            self._file.close()


def _number(name: str, value: Any) -> Number:
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise LoopError(f"run.log({name}=...) got a tensor of shape {tuple(value.shape)}; log one number")
        if type(value) is torch.Tensor and value.device.type == "cpu":
            return value.item()  # there is nothing to wait for
        return value.detach().clone()  # it is read later, and a running total changes in place until then
    try:
        return float(value)
    except (TypeError, ValueError):
        raise LoopError(f"run.log({name}=...) got a {type(value).__name__}; log a number or a tensor of one") from None


def _to_host(values: list[Number]) -> torch.Tensor:
    """All values in one tensor on the CPU, with one wait for the GPU at most."""
    if not any(isinstance(value, torch.Tensor) for value in values):
        return torch.tensor(values, dtype=torch.float64)
    tensors = [value.full_tensor() if hasattr(value, "full_tensor") else value for value in values]
    if not any(isinstance(value, torch.Tensor) and value.is_cuda for value in tensors):
        return torch.tensor([float(value) for value in tensors], dtype=torch.float64)
    device = next(value.device for value in tensors if isinstance(value, torch.Tensor) and value.is_cuda)
    parts = [torch.as_tensor(value, device=device).double().reshape(()) for value in tensors]
    return torch.stack(parts).cpu()
