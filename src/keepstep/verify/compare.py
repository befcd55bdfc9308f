"""Two runs, step by step and tensor by tensor: bitwise equal, or where they first differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from keepstep.fingerprints.writer import KINDS
from keepstep.folder import RunFolder
from keepstep.verify.prints import Attempt, Print, read_attempts

METRICS = "metrics"


@dataclass(frozen=True)
class Difference:
    """The first thing that is not the same."""

    kind: str
    """One of KINDS, `metrics`, or `steps`."""
    name: str
    step: int
    rank: int | None
    attempt: int
    """How often the run had been started before; 0: it was not disturbed yet."""
    also: int = 0
    """How many other things of the same step differ."""

    @property
    def words(self) -> str:
        who = f" on rank {self.rank}" if self.rank is not None else ""
        also = f" (and {self.also} more in that step)" if self.also else ""
        return f"{self.kind} '{self.name}'{who} at step {self.step}{also}"


@dataclass(frozen=True)
class Comparison:
    """How much was compared, and what came of it."""

    steps: int
    replayed: int
    counts: dict[str, int]
    """Kind → values of it that were compared."""
    differences: dict[str, Difference]
    """Kind → the first of that kind."""

    @property
    def values(self) -> int:
        return sum(self.counts.values())

    @property
    def first(self) -> Difference | None:
        """The first in time; within a step, the one that brings on the others."""
        order = [*KINDS, "steps", METRICS]
        found = [difference for difference in self.differences.values() if difference.kind != METRICS]
        found = found or list(self.differences.values())
        return min(found, key=lambda d: (d.attempt, d.step, order.index(d.kind)), default=None)


def compare(reference: RunFolder, other: RunFolder, ignored_metrics: frozenset[str] = frozenset()) -> Comparison:
    """Every step that `other` made, also those made again, with the same step of the reference."""
    expected, found = read_attempts(reference.path), read_attempts(other.path)
    differences: dict[str, Difference] = {}
    steps: set[int] = set()
    replayed = 0
    counts: Counter[str] = Counter()
    for rank, attempts in found.items():
        known = by_step(expected.get(rank, []))
        made: set[int] = set()
        for number, attempt in enumerate(attempts):
            for entry in attempt.prints:
                replayed += rank == 0 and entry.step in made
                made.add(entry.step)
                if entry.step in known:
                    counts += _note(differences, known[entry.step], entry, rank, number)
        missing = sorted(known.keys() ^ made)
        if missing:
            _keep_first(differences, Difference("steps", "made", missing[0], rank, len(attempts) - 1, len(missing) - 1))
        steps |= made
    missing_ranks = sorted(expected.keys() ^ found.keys())
    if missing_ranks:
        _keep_first(differences, Difference("steps", "made", 1, missing_ranks[0], 0))
    metric = compare_metrics(reference, other, ignored_metrics)
    if metric is not None:
        differences[METRICS] = metric
    counts[METRICS] = sum(len(line) for line in other.read_metrics())
    order = [*KINDS, METRICS]
    return Comparison(len(steps), replayed, {kind: counts[kind] for kind in order if counts[kind]}, differences)


def by_step(attempts: list[Attempt]) -> dict[int, Print]:
    """The newest print of every step."""
    return {entry.step: entry for attempt in attempts for entry in attempt.prints}


def _note(differences: dict[str, Difference], known: Print, entry: Print, rank: int, attempt: int) -> Counter[str]:
    """Notes the first difference of each kind; returns how many values of each were compared."""
    expected, found = dict(_values(known)), dict(_values(entry))
    if expected != found:
        names = dict.fromkeys((*expected, *found))
        different = [key for key in names if expected.get(key) != found.get(key)]
        for kind, name in different:
            also = sum(other[0] == kind for other in different) - 1
            _keep_first(differences, Difference(kind, name, entry.step, rank, attempt, also))
    return Counter(kind for kind, _ in found)


def _keep_first(differences: dict[str, Difference], new: Difference) -> None:
    known = differences.get(new.kind)
    if known is None or (new.attempt, new.step) < (known.attempt, known.step):
        differences[new.kind] = new


def _values(entry: Print) -> Iterator[tuple[tuple[str, str], Any]]:
    for number, batch in enumerate(entry.batches):
        name = "batch" if number == 0 else f"batch {number + 1}"
        yield ("samples", name), (batch["content"], batch["indices"], batch["count"])
    for name, value in entry.rng.items():
        yield ("rng", name), value
    yield from entry.state.items()


def compare_metrics(reference: RunFolder, other: RunFolder, ignored: frozenset[str]) -> Difference | None:
    """The first logged value that differs."""
    expected, found = reference.read_metrics(), other.read_metrics()
    for before, after in zip(expected, found, strict=False):
        for name in (*before, *after):
            if name not in ignored and before.get(name) != after.get(name):
                return Difference(METRICS, name, int(before["step"]), None, 0)
    if len(expected) != len(found):
        return Difference(METRICS, "lines", min(len(expected), len(found)) + 1, None, 0)
    return None


def unsteady_metrics(one: RunFolder, other: RunFolder) -> frozenset[str]:
    """Metrics that differ between two runs, as a speed does."""
    pairs = zip(one.read_metrics(), other.read_metrics(), strict=False)
    return frozenset(name for a, b in pairs for name in a if a.get(name) != b.get(name))
