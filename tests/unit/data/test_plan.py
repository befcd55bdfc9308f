"""Which samples step k holds: a bijection, the same for every world size, at any size of the data set."""

from __future__ import annotations

import time
import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.data import plan as plan_module
from keepstep.data.plan import Plan, permute, split
from keepstep.errors import DataError

HUGE = 10**10

plans = st.builds(
    Plan,
    num_samples=st.integers(1, 300),
    batch_size=st.integers(1, 40),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    seed=st.integers(-(2**63), 2**64),
)


@given(st.integers(1, 3000), st.integers(0, 2**64 - 1))
def test_permute_is_a_bijection(size: int, key: int) -> None:
    permuted = permute(np.arange(size), size, key)
    assert np.array_equal(np.sort(permuted), np.arange(size))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 15, 16, 17, 255, 256, 257, 4096, 4097])
def test_permute_is_a_bijection_about_powers_of_two(size: int) -> None:
    for key in range(20):
        assert len(np.unique(permute(np.arange(size), size, key))) == size
        assert permute(np.arange(size), size, key).max() == size - 1


@given(st.integers(1, 1000), st.integers(0, 2**64 - 1), st.data())
def test_permute_maps_a_position_alike_whatever_comes_with_it(size: int, key: int, data: st.DataObject) -> None:
    positions = np.array(data.draw(st.lists(st.integers(0, size - 1), max_size=10)), dtype=np.int64)
    assert np.array_equal(permute(positions, size, key), permute(np.arange(size), size, key)[positions])


def test_permute_leaves_its_input_alone() -> None:
    positions = np.arange(10)
    permute(positions, 10, 1)
    assert positions.tolist() == list(range(10))


def test_permute_shuffles_well() -> None:
    """Every sample comes to every place about equally often, and neighbours do not stay together."""
    size, passes = 16, 4000
    counts = np.zeros((size, size))
    followers = 0
    for key in range(passes):
        order = permute(np.arange(size), size, key)
        counts[np.arange(size), order] += 1
        followers += int((np.diff(order) == 1).sum())
    expected = passes / size
    chi_square = ((counts - expected) ** 2 / expected).sum()
    degrees = (size - 1) ** 2
    assert abs(chi_square - degrees) < 6 * (2 * degrees) ** 0.5
    assert followers == pytest.approx(passes * (size - 1) / size, rel=0.1)


@given(plans, st.integers(1, 9), st.integers(0, 3))
def test_every_sample_comes_exactly_once_over_any_world_size(plan: Plan, world_size: int, pass_number: int) -> None:
    seen = [
        plan.share(pass_number, batch, rank, world_size)
        for batch in range(plan.num_batches)
        for rank in range(world_size)
    ]
    samples = np.concatenate([*seen, np.empty(0, np.int64)])
    assert len(np.unique(samples)) == len(samples)
    expected = plan.num_samples // plan.batch_size * plan.batch_size if plan.drop_last else plan.num_samples
    assert len(samples) == expected
    assert samples.size == 0 or (samples.min() >= 0 and samples.max() < plan.num_samples)


@given(plans, st.integers(1, 9), st.data())
def test_the_shares_end_to_end_are_the_global_batch(plan: Plan, world_size: int, data: st.DataObject) -> None:
    if not plan.num_batches:
        return
    batch = data.draw(st.integers(0, plan.num_batches - 1))
    shares = [plan.share(3, batch, rank, world_size) for rank in range(world_size)]
    assert np.array_equal(np.concatenate(shares), plan.global_batch(3, batch))
    assert sum(map(len, shares)) == plan.size(batch)
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1


@given(plans, st.integers(0, 200))
def test_indices_of_a_step_are_those_of_its_pass_and_batch(plan: Plan, step: int) -> None:
    if not plan.num_batches:
        with pytest.raises(DataError, match=f"{plan.num_samples} samples make no batch of {plan.batch_size}"):
            plan.indices(step)
        return
    pass_number, batch = divmod(step, plan.num_batches)
    assert np.array_equal(plan.indices(step), plan.global_batch(pass_number, batch))
    halves = [plan.indices(step, rank, 2) for rank in range(2)]
    assert np.array_equal(np.concatenate(halves), plan.indices(step))


@given(plans, st.integers(1, 5), st.integers(0, 20), st.integers(1, 60))
def test_working_ahead_gives_the_same_shares(
    monkeypatch: pytest.MonkeyPatch, plan: Plan, world_size: int, start: int, ahead: int
) -> None:
    """However many batches are shuffled at once, and from wherever a run resumes."""
    monkeypatch.setattr(plan_module, "_AHEAD", ahead)
    for rank in range(world_size):
        found = [(batch, share.tolist()) for batch, share in plan.ahead(2, start, rank, world_size)]
        expected = [(b, plan.share(2, b, rank, world_size).tolist()) for b in range(start, plan.num_batches)]
        assert found == expected


def test_an_unshuffled_plan_is_in_order() -> None:
    plan = Plan(10, 4)
    assert [plan.indices(step).tolist() for step in range(4)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], [0, 1, 2, 3]]


def test_passes_and_seeds_shuffle_differently() -> None:
    orders = {
        tuple(Plan(100, 100, True, seed=seed).global_batch(number, 0).tolist())
        for seed in range(3)
        for number in range(3)
    }
    assert len(orders) == 9


def test_the_order_keeps_its_value_for_good() -> None:
    """A run that was saved by one version goes on under the next, on the same samples."""
    assert Plan(20, 8, shuffle=True, seed=1).global_batch(2, 0).tolist() == [2, 11, 5, 18, 1, 15, 3, 19]


def test_the_last_batch_is_smaller_or_dropped() -> None:
    assert [Plan(10, 4).size(batch) for batch in range(3)] == [4, 4, 2]
    assert Plan(10, 4, drop_last=True).num_batches == 2
    assert Plan(8, 4, drop_last=True).num_batches == 2
    assert Plan(3, 4, drop_last=True).num_batches == 0


@pytest.mark.parametrize("batch", [-1, 3])
def test_a_batch_outside_the_pass_is_an_error(batch: int) -> None:
    with pytest.raises(IndexError, match=f"batch {batch} of 3"):
        Plan(10, 4).global_batch(0, batch)


def test_a_batch_of_nothing_is_an_error() -> None:
    with pytest.raises(DataError, match="batch_size is 0; at least 1 is needed"):
        Plan(10, 0)


@given(st.integers(0, 1000), st.integers(0, 1000), st.integers(1, 40))
def test_split_covers_a_range_without_gaps_larger_parts_first(start: int, length: int, world_size: int) -> None:
    parts = [split(start, start + length, rank, world_size) for rank in range(world_size)]
    assert parts[0][0] == start and parts[-1][1] == start + length
    assert all(a[1] == b[0] for a, b in pairwise(parts))
    sizes = [end - begin for begin, end in parts]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


def test_a_batch_of_ten_billion_samples_costs_what_a_batch_costs() -> None:
    plan = Plan(HUGE, 256, shuffle=True, seed=1)
    last = plan.num_batches - 1
    plan.indices(last)
    tracemalloc.start()
    try:
        began = time.perf_counter()
        for step in (0, last // 2, last, 3 * plan.num_batches + 17):
            indices = plan.indices(step)
            assert len(np.unique(indices)) == 256 and indices.min() >= 0 and indices.max() < HUGE
        seconds = time.perf_counter() - began
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20, "memory must be that of the batch"
    assert seconds < 1.0, "a stored permutation of 10**10 would take minutes"


def test_the_first_batch_ahead_of_a_huge_data_set_comes_at_once() -> None:
    plan = Plan(HUGE, 256, shuffle=True, seed=1)
    tracemalloc.start()
    try:
        began = time.perf_counter()
        batch, samples = next(plan.ahead(0, plan.num_batches // 2, 1, 2))
        seconds = time.perf_counter() - began
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert np.array_equal(samples, plan.share(0, batch, 1, 2))
    assert peak < 4 << 20 and seconds < 1.0


def test_batches_of_a_huge_data_set_do_not_overlap() -> None:
    plan = Plan(HUGE, 1000, shuffle=True)
    samples = np.concatenate(
        [plan.global_batch(0, batch) for batch in range(0, plan.num_batches, plan.num_batches // 20)]
    )
    assert len(np.unique(samples)) == len(samples) >= 20_000
    assert samples.mean() == pytest.approx(HUGE / 2, rel=0.05)
