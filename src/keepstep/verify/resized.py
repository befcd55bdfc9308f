"""A run that went on with another number of workers, against one that did not: the same samples, and near enough."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from keepstep.folder import RunFolder
from keepstep.verify.compare import by_step
from keepstep.verify.prints import Attempt, Print, read_attempts

TOLERANCE = 0.01
"""Of a metric's largest value: rounding, which grows from step to step, stays far below; a lost update does not."""
_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class Resized:
    """What came of the change."""

    workers_before: int
    workers: int
    at_step: int
    steps: int
    """Steps made by the other number of workers."""
    same_samples: bool
    first_other_sample: int | None
    """The first step that saw others."""
    compared_by: str
    largest: float
    """The largest difference of a metric, relative to its largest value."""
    metric: str
    depends_on_split: str
    """Why metrics may differ by nature; empty where they may not."""

    @property
    def is_good(self) -> bool:
        return self.same_samples and (self.largest <= TOLERANCE or bool(self.depends_on_split))


def compare_resized(reference: RunFolder, other: RunFolder, ignored_metrics: frozenset[str]) -> Resized:
    """`other` has stopped on request and gone on with another number of workers."""
    expected, found = read_attempts(reference.path), read_attempts(other.path)
    last = found[0][-1]
    before = {rank: by_step(attempts) for rank, attempts in expected.items()}
    after = {rank: by_step(_with(attempts, last.world_size)) for rank, attempts in found.items()}
    after = {rank: prints for rank, prints in after.items() if rank < last.world_size}
    steps = sorted(after[0])
    other_samples, by = None, "numbers"
    for step in steps:
        pair = [_samples(ranks, step) for ranks in (before, after)]
        by = {"indices": "numbers", "samples": "contents", "nothing": "nothing"}[pair[0][0]]
        if pair[0] != pair[1]:
            other_samples = step
            break
    largest, metric = _largest_difference(reference, other, ignored_metrics)
    return Resized(
        workers_before=len(expected),
        workers=last.world_size,
        at_step=steps[0] - 1 if steps else 0,
        steps=len(steps),
        same_samples=bool(steps) and other_samples is None,
        first_other_sample=other_samples,
        compared_by=by,
        largest=largest,
        metric=metric,
        depends_on_split=_depends_on_split(expected),
    )


def _with(attempts: list[Attempt], world_size: int) -> list[Attempt]:
    return [attempt for attempt in attempts if attempt.world_size == world_size]


def _samples(ranks: dict[int, dict[int, Print]], step: int) -> tuple[Any, ...]:
    """What all workers together saw in a step, whoever saw which: the samples' numbers, or else their contents."""
    batches = [prints[step].batches for prints in ranks.values() if step in prints]
    kind = "indices" if all(b["indices"] is not None for part in batches for b in part) else "samples"
    totals: list[tuple[int, int]] = []
    for parts in zip(*batches, strict=True):
        if any(part[kind] is None for part in parts):
            return ("nothing",)  # collated so that no sample can be told from another
        totals.append((sum(part["count"] for part in parts), sum(part[kind] for part in parts) & _MASK))
    return kind, tuple(totals)


def _largest_difference(reference: RunFolder, other: RunFolder, ignored: frozenset[str]) -> tuple[float, str]:
    expected, found = reference.read_metrics(), other.read_metrics()
    if len(expected) != len(found):
        return float("inf"), "number of lines"
    scale: dict[str, float] = {}
    for line in expected:
        for name, value in line.items():
            scale[name] = max(scale.get(name, 0.0), abs(float(value)))
    largest, metric = 0.0, ""
    for a, b in zip(expected, found, strict=True):
        for name in a.keys() - {"step", "epoch"} - ignored:
            difference = abs(float(a[name]) - float(b.get(name, "nan")))
            relative = difference / scale[name] if scale[name] else difference
            if float(a[name]) != float(b.get(name, "nan")) and not relative <= largest:
                largest, metric = relative, name
    return largest, metric


def _depends_on_split(expected: dict[int, list[Attempt]]) -> str:
    """Why another number of workers cannot give the same numbers, if so."""
    prints = [entry for attempt in expected[0] for entry in attempt.prints]
    if any(a.rng != b.rng for a, b in pairwise(prints)):
        return "the loop draws random numbers, as dropout does, and each worker has its own"
    if prints and any(name.endswith("running_mean") for kind, name in prints[0].state if kind == "weights"):
        return "BatchNorm normalises by each worker's own part of the batch"
    return ""
