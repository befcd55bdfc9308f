"""The order in which a map-style data set's samples are taken: worked out from the user's DataLoader."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol, runtime_checkable

import numpy as np
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from keepstep.data.plan import Indices, Plan, split
from keepstep.errors import DataError
from keepstep.seeding import mix, mix_array


@runtime_checkable
class Stateful(Protocol):
    """Anything that can say where it is and be put back there."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> Any: ...


@dataclass(frozen=True)
class Share:
    """One worker's part of one global batch."""

    indices: Indices
    num_global: int
    """Samples in the whole global batch."""
    stand_in: Indices | None = None
    """Where the share is empty: a sample of the batch to keep step on, which counts for nothing."""
    state: dict[str, Any] | None = None
    """Where the order stands after this batch; None where the batch number says it all."""


class Order(Protocol):
    """Yields this worker's share of every global batch of a pass, from batch `start` on."""

    num_batches: int | None

    def shares(self, pass_number: int, start: int, rank: int, world_size: int) -> Iterator[Share]: ...

    def resume(self, state: dict[str, Any]) -> None:
        """Makes the next `shares` go on from a `Share.state`."""


class PlannedOrder:
    """Sequential, shuffled, or a shuffled subset: all are a `Plan`, so any batch is reached in O(batch)."""

    def __init__(self, plan: Plan, subset: Sequence[int] | None = None) -> None:
        self.plan = plan
        self.num_batches: int | None = plan.num_batches
        self._subset = None if subset is None else np.asarray(subset, dtype=np.int64)

    def shares(self, pass_number: int, start: int, rank: int, world_size: int) -> Iterator[Share]:
        for batch, samples in self.plan.ahead(pass_number, start, rank, world_size):
            indices = self._samples(samples)
            stand_in = None
            if not len(indices):
                stand_in = self._samples(self.plan.share(pass_number, batch, 0, world_size))[:1]
            yield Share(indices, self.plan.size(batch), stand_in)

    def _samples(self, positions: Indices) -> Indices:
        return positions if self._subset is None else self._subset[positions]

    def resume(self, state: dict[str, Any]) -> None:
        raise AssertionError("a planned order has no state")


class WeightedOrder(PlannedOrder):
    """`WeightedRandomSampler` with replacement: each position of a pass draws its own sample."""

    def __init__(self, plan: Plan, weights: Any) -> None:
        super().__init__(plan)
        self._cumulative = np.cumsum(np.asarray(weights, dtype=np.float64))

    def shares(self, pass_number: int, start: int, rank: int, world_size: int) -> Iterator[Share]:
        for share in super().shares(pass_number, start, rank, world_size):
            words = mix_array(mix(self.plan.seed, pass_number), share.indices.astype(np.uint64))
            uniform = (words >> np.uint64(11)).astype(np.float64) / float(1 << 53)
            drawn = np.searchsorted(self._cumulative, uniform * self._cumulative[-1], side="right")
            indices = np.minimum(drawn, len(self._cumulative) - 1).astype(np.int64)
            yield Share(indices, share.num_global, share.stand_in)


class StatefulOrder:
    """A user's own stateful sampler: every worker runs the same one and takes its part of each global batch."""

    def __init__(self, sampler: Any, batch_size: int | None, drop_last: bool) -> None:
        self._sampler, self._batch_size, self._drop_last = sampler, batch_size, drop_last
        self.num_batches = self._length()

    def shares(self, pass_number: int, start: int, rank: int, world_size: int) -> Iterator[Share]:
        for batch in self._batches():
            begin, end = split(0, len(batch), rank, world_size)
            indices = np.asarray(batch[begin:end], dtype=np.int64)
            stand_in = None if len(indices) else np.asarray(batch[:1], dtype=np.int64)
            yield Share(indices, len(batch), stand_in, dict(self._sampler.state_dict()))

    def resume(self, state: dict[str, Any]) -> None:
        self._sampler.load_state_dict(state)

    def _batches(self) -> Iterator[list[int]]:
        iterator = iter(self._sampler)
        if self._batch_size is None:
            yield from (list(batch) for batch in iterator)
            return
        while batch := list(islice(iterator, self._batch_size)):
            if len(batch) == self._batch_size or not self._drop_last:
                yield batch

    def _length(self) -> int | None:
        try:
            length = len(self._sampler)
        except TypeError:
            return None
        if self._batch_size is None:
            return length
        return length // self._batch_size if self._drop_last else -(-length // self._batch_size)


def order_of(loader: DataLoader[Any], seed: int) -> tuple[Order, int | None]:
    """The order that a DataLoader asks for, and its global batch size where it has one."""
    if loader.batch_size is None:
        return _own_batches(loader)
    assert loader.sampler is not None
    return _order(loader.sampler, loader.batch_size, loader.drop_last, seed), loader.batch_size


def _own_batches(loader: DataLoader[Any]) -> tuple[Order, None]:
    sampler = loader.batch_sampler
    if sampler is None:
        raise DataError(
            "a DataLoader with batch_size=None hands over whole batches that cannot be divided between workers; "
            "give batch_size=N (the global batch) and let the data set return single samples"
        )
    if not isinstance(sampler, Stateful):
        raise _not_stateful("batch_sampler", sampler)
    return StatefulOrder(sampler, None, False), None


def _order(sampler: Iterable[int], batch_size: int, drop_last: bool, seed: int) -> Order:
    # Exact types: a subclass may order samples in its own way, which must not be dropped in silence.
    kind = type(sampler)
    if kind is SequentialSampler:
        return PlannedOrder(Plan(len(sampler), batch_size, False, drop_last, seed))  # type: ignore[arg-type]
    if kind is RandomSampler and not sampler.replacement:  # type: ignore[attr-defined]
        plan = Plan(len(sampler.data_source), batch_size, True, drop_last, seed)  # type: ignore[attr-defined]
        if sampler.num_samples == plan.num_samples:  # type: ignore[attr-defined]
            return PlannedOrder(plan)
    if kind is SubsetRandomSampler:
        subset = list(sampler.indices)  # type: ignore[attr-defined]
        return PlannedOrder(Plan(len(subset), batch_size, True, drop_last, seed), subset)
    if kind is WeightedRandomSampler and sampler.replacement:  # type: ignore[attr-defined]
        plan = Plan(sampler.num_samples, batch_size, False, drop_last, seed)  # type: ignore[attr-defined]
        return WeightedOrder(plan, sampler.weights)  # type: ignore[attr-defined]
    if _is_torchdata_sampler(sampler):
        return _order(_plain_sampler(sampler), batch_size, drop_last, seed)
    if isinstance(sampler, Stateful):
        return StatefulOrder(sampler, batch_size, drop_last)
    raise _not_stateful("sampler", sampler)


def _is_torchdata_sampler(sampler: object) -> bool:
    # torchdata's StatefulDataLoader replaces shuffle=True by samplers of its own; the plan does their work.
    return type(sampler).__module__.startswith("torchdata.stateful_dataloader")


def _plain_sampler(sampler: Any) -> Iterable[int]:
    if isinstance(sampler, RandomSampler):
        return RandomSampler(sampler.data_source, sampler.replacement, sampler._num_samples)
    if isinstance(sampler, BatchSampler):
        return sampler.sampler
    return SequentialSampler(sampler.data_source)


def _not_stateful(what: str, sampler: object) -> DataError:
    return DataError(
        f"the DataLoader's {what} is a {type(sampler).__name__}, whose place cannot be saved; "
        "give it state_dict() and load_state_dict(), or use shuffle=True"
    )
