"""The order in which a map-style data set's samples are taken: worked out from the user's DataLoader."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from itertools import islice
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
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


class Share(NamedTuple):
    """One worker's part of one global batch."""

    indices: Indices
    num_global: int
    """Samples in the whole global batch."""
    stand_in: Indices | None = None
    """Where the share is empty: a sample of the batch to keep step on, which counts for nothing."""
    state: dict[str, Any] | None = None
    """Where the order stands after this batch; None where the batch number says it all."""
    ended: bool = False
    """Whether the pass is known to be over with this batch, and `state` therefore to be that of the next one."""


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
        for batch, positions in self.plan.ahead(pass_number, start, rank, world_size):
            stand_in = None
            if not len(positions):
                stand_in = self._samples(pass_number, self.plan.share(pass_number, batch, 0, world_size)[:1])
            yield Share(self._samples(pass_number, positions), self.plan.size(batch), stand_in)

    def _samples(self, pass_number: int, positions: Indices) -> Indices:
        return positions if self._subset is None else self._subset[positions]

    def resume(self, state: dict[str, Any]) -> None:
        raise DataError(
            "the checkpoint has the place in a sampler or a stream that this DataLoader lacks; use another --name"
        )


class WeightedOrder(PlannedOrder):
    """`WeightedRandomSampler` with replacement: each position of a pass draws its own sample."""

    def __init__(self, plan: Plan, weights: Any) -> None:
        super().__init__(plan)
        weights = np.asarray(weights, dtype=np.float64)
        self._cumulative = np.cumsum(weights)
        if not (weights >= 0).all() or not 0 < self._cumulative[-1] < np.inf:
            raise DataError("the WeightedRandomSampler's weights must be 0 or more, finite, and not all 0")

    def _samples(self, pass_number: int, positions: Indices) -> Indices:
        words = mix_array(mix(self.plan.seed, pass_number), positions.astype(np.uint64))
        uniform = (words >> np.uint64(11)).astype(np.float64) / float(1 << 53)
        drawn = np.searchsorted(self._cumulative, uniform * self._cumulative[-1], side="right")
        indices: Indices = np.minimum(drawn, len(self._cumulative) - 1).astype(np.int64)
        return indices


class StatefulOrder:
    """A user's own stateful sampler: every worker runs the same one and takes its part of each global batch."""

    def __init__(self, sampler: Any, batch_size: int | None, drop_last: bool) -> None:
        self._sampler, self._batch_size, self._drop_last = sampler, batch_size, drop_last
        try:
            self._length: int | None = len(sampler)
        except TypeError:
            self._length = None
        self.num_batches = self._count()

    def shares(self, pass_number: int, start: int, rank: int, world_size: int) -> Iterator[Share]:
        for batch, ended in self._batches(start):
            begin, end = split(0, len(batch), rank, world_size)
            indices = np.asarray(batch[begin:end], dtype=np.int64)
            stand_in = None if len(indices) else np.asarray(batch[:1], dtype=np.int64)
            # A copy to the last list in it: the sampler moves on while this batch is still on its way.
            yield Share(indices, len(batch), stand_in, deepcopy(self._sampler.state_dict()), ended)

    def resume(self, state: dict[str, Any]) -> None:
        self._sampler.load_state_dict(deepcopy(state))

    def _batches(self, start: int) -> Iterator[tuple[list[int], bool]]:
        """(batch, whether the sampler came to its end in it), from where the sampler stands: after `start` batches."""
        iterator = iter(self._sampler)
        if self._batch_size is None:
            yield from ((list(batch), False) for batch in iterator)
            return
        taken = start * self._batch_size
        while batch := list(islice(iterator, wanted := self._next_size(taken, self._batch_size))):
            taken += len(batch)
            if len(batch) == self._batch_size or not self._drop_last:
                yield batch, len(batch) < wanted

    def _next_size(self, taken: int, batch_size: int) -> int:
        # A sampler that is asked for more than it has begins again, and its state is no longer of this pass. So the
        # last batch asks for what is left, and the sampler comes to its end only once that batch was handed out.
        left = 0 if self._length is None else self._length - taken
        return min(batch_size, left) if left > 0 else batch_size

    def _count(self) -> int | None:
        if self._length is None or self._batch_size is None:
            return self._length
        return self._length // self._batch_size if self._drop_last else -(-self._length // self._batch_size)


def order_of(loader: DataLoader[Any], seed: int) -> Order:
    """The order that a DataLoader asks for."""
    if loader.batch_size is None:
        return _own_batches(loader)
    assert loader.sampler is not None
    return _order(loader.sampler, loader.batch_size, loader.drop_last, seed)


def _own_batches(loader: DataLoader[Any]) -> Order:
    sampler = loader.batch_sampler
    if sampler is None:
        raise DataError(
            "a DataLoader with batch_size=None hands over whole batches that cannot be divided between workers; "
            "give batch_size=N (the global batch) and let the data set return single samples"
        )
    if not isinstance(sampler, Stateful):
        raise _not_stateful("batch_sampler", sampler)
    return StatefulOrder(sampler, None, False)


def _order(sampler: Iterable[int], batch_size: int, drop_last: bool, seed: int) -> Order:
    # Exact types: a subclass may order samples in its own way, which must not be dropped in silence.
    kind = type(sampler)
    if kind is SequentialSampler:
        return PlannedOrder(Plan(len(sampler), batch_size, False, drop_last, seed))  # type: ignore[arg-type]
    if _is_random_sampler(kind) and not sampler.replacement:  # type: ignore[attr-defined]
        plan = Plan(len(sampler.data_source), batch_size, True, drop_last, seed)  # type: ignore[attr-defined]
        if sampler.num_samples == plan.num_samples:  # type: ignore[attr-defined]
            return PlannedOrder(plan)
    if kind is SubsetRandomSampler:
        subset = list(sampler.indices)  # type: ignore[attr-defined]
        return PlannedOrder(Plan(len(subset), batch_size, True, drop_last, seed), subset)
    if kind is WeightedRandomSampler and sampler.replacement:  # type: ignore[attr-defined]
        plan = Plan(sampler.num_samples, batch_size, False, drop_last, seed)  # type: ignore[attr-defined]
        return WeightedOrder(plan, sampler.weights)  # type: ignore[attr-defined]
    if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
        raise DataError(
            f"the DataLoader's sampler is a {kind.__name__} of {sampler.num_replicas} replicas, but every batch is "
            "divided between the workers as it is; leave the sampler out and use shuffle=True"
        )
    if isinstance(sampler, Stateful):
        return StatefulOrder(sampler, batch_size, drop_last)
    raise _not_stateful("sampler", sampler)


def _is_random_sampler(kind: type) -> bool:
    # torchdata's StatefulDataLoader has a RandomSampler of its own for shuffle=True, not related to torch's but with
    # the same attributes. By name, so that torchdata need not be there.
    torchdatas = (kind.__module__, kind.__qualname__) == ("torchdata.stateful_dataloader.sampler", "RandomSampler")
    return kind is RandomSampler or torchdatas


def _not_stateful(what: str, sampler: object) -> DataError:
    return DataError(
        f"the DataLoader's {what} is a {type(sampler).__name__}, whose place cannot be saved; "
        "give it state_dict() and load_state_dict(), or use shuffle=True"
    )
