"""What the driver tells a trial: plain data, which Ray Tune carries as the trial's configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from keepstep.job import Target
from keepstep.tune.domain import Value
from keepstep.tune.journal import Record
from keepstep.tune.search import Search

KEY = "trial"
"""Where in the trial's configuration it stands."""


@dataclass(frozen=True)
class CopyOrder:
    """Go on from another trial's newest checkpoint, with values that were near those it was made with."""

    order: int
    donor: str
    before: dict[str, Value]
    after: dict[str, Value]


@dataclass(frozen=True)
class Order:
    """One trial's run."""

    number: int
    run: str
    storage: str
    metric: str
    words: list[str]
    """`keepstep`'s, that start or resume the run."""
    values: dict[str, Value]
    folder: str | None
    """Where to start it; None: where Ray has put what was shipped."""
    threads: int
    board: str
    copy: CopyOrder | None
    reports: int
    """How many were made before this launch of the search."""

    @classmethod
    def of(cls, config: dict[str, Any]) -> Order:
        raw = dict(config[KEY])
        copy = raw.pop("copy")
        return cls(**raw, copy=CopyOrder(**copy) if copy else None)


@dataclass(frozen=True)
class Place:
    """Where trials run: the same for all of them."""

    storage: str
    target: Target
    folder: str | None
    board: str

    def order(self, search: Search, record: Record) -> Order:
        copy = record.copy
        return Order(
            number=record.number,
            run=search.run_name(record.number),
            storage=self.storage,
            metric=search.metric,
            words=search.words(search.run_name(record.number), self.storage, self.target, record.values),
            values=record.values,
            folder=self.folder,
            threads=max(1, int(search.launch.cpus_per_worker)),
            board=self.board,
            copy=None
            if copy is None
            else CopyOrder(copy.order, search.run_name(copy.donor), copy.values_before, record.values),
            reports=len(record.reports),
        )
