"""Which order a DataLoader's sampler asks for, and that one which cannot be kept is refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader import sampler as torchdata_sampler

from keepstep.data.order import Order, PlannedOrder, Share, StatefulOrder, WeightedOrder, order_of
from keepstep.data.plan import Plan
from keepstep.errors import DataError
from unit.data.samplers import Countdown

# torchdata 0.11 itself calls what torch has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")


def numbers(count: int) -> TensorDataset:
    return TensorDataset(torch.arange(count))


class Pairs(Countdown):
    """A stateful batch sampler, whose batches grow."""

    def __iter__(self) -> Iterator[list[int]]:  # type: ignore[override]
        while self.next < self.count:
            self.next += 1
            yield list(range(self.next))
        self.next = 0


def indices(order: Order, pass_number: int = 0, start: int = 0, rank: int = 0, world_size: int = 1) -> list[list[int]]:
    return [share.indices.tolist() for share in order.shares(pass_number, start, rank, world_size)]


def flat(lists: Iterable[list[int]]) -> list[int]:
    return [number for part in lists for number in part]


def order(loader: DataLoader[Any], seed: int = 0) -> Order:
    return order_of(loader, seed)


def test_an_unshuffled_loader_is_read_in_order() -> None:
    found = order_of(DataLoader(numbers(5), batch_size=2), seed=0)
    assert indices(found) == [[0, 1], [2, 3], [4]]
    assert found.num_batches == 3


def test_a_shuffled_loader_follows_the_plan() -> None:
    found = order(DataLoader(numbers(20), batch_size=8, shuffle=True), seed=3)
    plan = Plan(20, 8, shuffle=True, seed=3)
    assert indices(found, pass_number=2) == [plan.global_batch(2, batch).tolist() for batch in range(3)]


def test_drop_last_is_kept() -> None:
    found = order(DataLoader(numbers(5), batch_size=2, drop_last=True))
    assert indices(found) == [[0, 1], [2, 3]]


def test_a_start_skips_batches_without_drawing_them() -> None:
    found = order(DataLoader(numbers(50), batch_size=8, shuffle=True))
    assert indices(found, start=4) == indices(found)[4:]
    assert indices(found, start=7) == []


def test_a_subset_is_shuffled_within_itself() -> None:
    found = order(DataLoader(numbers(50), batch_size=4, sampler=SubsetRandomSampler([40, 10, 30, 20, 0])))
    first, second = indices(found), indices(found, pass_number=1)
    assert sorted(flat(first)) == sorted(flat(second)) == [0, 10, 20, 30, 40]
    assert first != second


def test_a_share_that_is_empty_has_a_sample_of_its_batch_to_stand_in() -> None:
    found = order(DataLoader(numbers(5), batch_size=4, sampler=SubsetRandomSampler([9, 8, 7, 6, 5])))
    shares = [list(found.shares(0, 0, rank, 4))[-1] for rank in range(4)]
    assert [len(share.indices) for share in shares] == [1, 0, 0, 0]
    assert shares[0].stand_in is None
    assert all(
        share.stand_in is not None and share.stand_in.tolist() == shares[0].indices.tolist() for share in shares[1:]
    )
    assert {share.num_global for share in shares} == {1}


@given(st.integers(1, 8), st.integers(0, 20))
def test_every_worlds_weighted_draws_are_the_same(world_size: int, pass_number: int) -> None:
    found = weighted([1.0, 2.0, 0.0, 5.0], count=21, batch_size=8)
    parts = [indices(found, pass_number, rank=rank, world_size=world_size) for rank in range(world_size)]
    together = [flat(part[batch] for part in parts) for batch in range(3)]
    assert together == indices(found, pass_number)


def weighted(weights: list[float], count: int, batch_size: int, seed: int = 0) -> Order:
    sampler = WeightedRandomSampler(weights, count)
    return order(DataLoader(numbers(len(weights)), batch_size=batch_size, sampler=sampler), seed)


def test_a_weighted_sampler_draws_by_weight() -> None:
    found = weighted([1.0, 3.0, 0.0, 6.0], count=20_000, batch_size=1000)
    assert isinstance(found, WeightedOrder)
    counts = Counter(flat(indices(found)))
    assert counts[2] == 0
    assert [counts[n] / 20_000 for n in (0, 1, 3)] == pytest.approx([0.1, 0.3, 0.6], abs=0.015)


def test_weighted_passes_and_seeds_draw_differently() -> None:
    drawn = {str(indices(weighted([1.0] * 50, 30, 30, seed), number)) for seed in range(2) for number in range(2)}
    assert len(drawn) == 4


def test_a_weighted_stand_in_is_a_sample_not_a_position() -> None:
    """9 draws of 3 samples: position 8, which is the last batch, is no sample."""
    found = weighted([1.0, 1.0, 1.0], count=9, batch_size=4)
    last = list(found.shares(0, 0, rank=1, world_size=2))[-1]
    assert len(last.indices) == 0 and last.stand_in is not None
    assert last.stand_in.tolist() == list(found.shares(0, 0, rank=0, world_size=2))[-1].indices.tolist()


@given(st.integers(1, 20), st.integers(1, 7), st.integers(1, 4), st.booleans())
def test_a_stateful_samplers_shares_make_its_own_order(count: int, batch: int, world_size: int, drop: bool) -> None:
    parts = []
    for rank in range(world_size):
        found = order(DataLoader(numbers(count), batch_size=batch, sampler=Countdown(count), drop_last=drop))
        parts.append(indices(found, rank=rank, world_size=world_size))
    together = [flat(shares) for shares in zip(*parts, strict=True)]
    expected = list(range(count))[::-1]
    batches = [expected[start : start + batch] for start in range(0, count, batch)]
    assert together == [b for b in batches if len(b) == batch or not drop]
    assert found.num_batches == len(together)


def test_a_stateful_sampler_goes_on_from_the_state_of_a_share() -> None:
    whole = indices(order(DataLoader(numbers(9), batch_size=2, sampler=Countdown(9))))
    shares = order(DataLoader(numbers(9), batch_size=2, sampler=Countdown(9))).shares(0, 0, 0, 1)
    states = [share.state for share in shares]
    for done, state in enumerate(states, start=1):
        resumed = order(DataLoader(numbers(9), batch_size=2, sampler=Countdown(9)))
        assert state is not None
        resumed.resume(state)
        assert indices(resumed, start=done) == whole[done:]


def test_a_shares_state_does_not_move_with_the_sampler() -> None:
    """DataLoader's workers fetch ahead: the state that is saved is that of the batch handed out, not of the newest."""

    class Listed(Countdown):
        def __init__(self, count: int) -> None:
            super().__init__(count)
            self.taken: list[int] = []

        def __iter__(self) -> Iterator[int]:
            for sample in super().__iter__():
                self.taken.append(sample)
                yield sample

        def state_dict(self) -> dict[str, Any]:
            return {"next": self.next, "taken": self.taken}

    shares = order(DataLoader(numbers(6), batch_size=2, sampler=Listed(6))).shares(0, 0, 0, 1)
    first = next(shares)
    next(shares)
    assert first.state == {"next": 2, "taken": [5, 4]}


def test_a_stateful_batch_sampler_keeps_its_batches() -> None:
    found = order_of(DataLoader(numbers(4), batch_sampler=Pairs(4)), seed=0)
    assert found.num_batches == 4
    assert indices(found, rank=0, world_size=2) == [[0], [0], [0, 1], [0, 1]]
    assert indices(found, rank=1, world_size=2) == [[], [1], [2], [2, 3]]


def test_a_sampler_without_a_length_has_no_number_of_batches() -> None:
    class Endless(Countdown):
        def __len__(self) -> int:
            raise TypeError("endless")

    assert order(DataLoader(numbers(4), batch_size=2, sampler=Endless(4))).num_batches is None


class Backwards(SequentialSampler):
    """A subclass of a known sampler, with an order of its own."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self))[::-1])


@pytest.mark.parametrize(
    "sampler",
    [
        Backwards(range(4)),
        RandomSampler(range(4), replacement=True),
        RandomSampler(range(4), num_samples=3),
        WeightedRandomSampler([1.0] * 4, 4, replacement=False),
        [3, 1, 2, 0],
    ],
)
def test_an_order_that_cannot_be_kept_is_refused_not_replaced(sampler: Any) -> None:
    with pytest.raises(DataError) as error:
        order_of(DataLoader(numbers(4), batch_size=2, sampler=sampler), seed=0)
    assert f"the DataLoader's sampler is a {type(sampler).__name__}, whose place cannot be saved" in str(error.value)
    assert "give it state_dict() and load_state_dict(), or use shuffle=True" in str(error.value)


def test_a_batch_sampler_without_state_is_refused() -> None:
    sampler = BatchSampler(SequentialSampler(range(4)), 2, drop_last=False)
    with pytest.raises(
        DataError, match="the DataLoader's batch_sampler is a BatchSampler, whose place cannot be saved"
    ):
        order_of(DataLoader(numbers(4), batch_sampler=sampler), seed=0)


def test_whole_batches_from_the_data_set_are_refused() -> None:
    with pytest.raises(DataError, match=r"batch_size=None .* cannot be divided between workers; give batch_size=N"):
        order_of(DataLoader(numbers(4), batch_size=None), seed=0)


@pytest.mark.parametrize("shuffle", [False, True])
def test_torchdatas_own_samplers_give_way_to_the_plan(shuffle: bool) -> None:
    mine = order(StatefulDataLoader(numbers(20), batch_size=8, shuffle=shuffle), seed=5)
    assert isinstance(mine, PlannedOrder)
    assert indices(mine, 1) == indices(order(DataLoader(numbers(20), batch_size=8, shuffle=shuffle), seed=5), 1)


def test_a_torchdata_loader_with_a_users_sampler_keeps_it() -> None:
    mine = order(StatefulDataLoader(numbers(4), batch_size=3, sampler=Countdown(4)))
    assert isinstance(mine, StatefulOrder)
    assert indices(mine) == [[3, 2, 1], [0]]


def test_a_torchdata_sampler_with_an_order_of_its_own_is_refused() -> None:
    sampler = torchdata_sampler.RandomSampler(range(4), replacement=True)
    with pytest.raises(DataError, match="a RandomSampler, whose place cannot be saved"):
        order(StatefulDataLoader(numbers(4), batch_size=2, sampler=sampler))


@pytest.mark.parametrize("kind", [DistributedSampler, torchdata_sampler.StatefulDistributedSampler])
def test_a_sampler_that_divides_between_workers_is_refused(kind: Any) -> None:
    """Batches are divided already: it would leave out most samples."""
    with pytest.raises(DataError, match=f"is a {kind.__name__} of 2 replicas.*leave the sampler out"):
        order(DataLoader(numbers(8), batch_size=2, sampler=kind(numbers(8), num_replicas=2, rank=0)))


def test_a_stateful_distributed_sampler_of_one_replica_is_a_stateful_sampler() -> None:
    sampler = torchdata_sampler.StatefulDistributedSampler(numbers(5), num_replicas=1, rank=0, shuffle=False)
    assert indices(order(DataLoader(numbers(5), batch_size=2, sampler=sampler))) == [[0, 1], [2, 3], [4]]


def test_a_short_batch_of_a_sampler_without_a_length_is_known_to_be_the_last() -> None:
    class Unsized(Countdown):
        def __len__(self) -> int:
            raise TypeError("unknown")

    shares = list(order(DataLoader(numbers(5), batch_size=2, sampler=Unsized(5))).shares(0, 0, 0, 1))
    assert [share.ended for share in shares] == [False, False, True]


@pytest.mark.parametrize("weights", [[0.0, 0.0], [1.0, -1.0, 3.0], [1.0, float("nan")]])
def test_weights_that_are_no_weights_are_refused(weights: list[float]) -> None:
    with pytest.raises(DataError, match="weights must be 0 or more"):
        weighted(weights, 4, 2)


def test_indices_are_whole_numbers_ready_for_any_data_set() -> None:
    sampler = SubsetRandomSampler(torch.tensor([3, 1]))  # type: ignore[arg-type]
    share: Share = next(order(DataLoader(numbers(4), batch_size=2, sampler=sampler)).shares(0, 0, 0, 1))
    assert share.indices.dtype == np.int64
    assert sorted(share.indices.tolist()) == [1, 3]
