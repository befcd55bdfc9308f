"""A prepared loader: the same global batches on any number of workers, weighted rightly, and resumed exactly."""

from __future__ import annotations

import random
import time
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from keepstep.data.loader import Batch, Loader
from keepstep.data.nested import move, size_of, take
from keepstep.errors import DataError
from keepstep.observe.heart import VALIDATION, Heart
from keepstep.seeding import seed_everything
from unit.data.samplers import Countdown

# torchdata 0.11 itself calls what torch has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")

MakeLoader = Callable[..., Loader]
Pair = namedtuple("Pair", "x y")
CPU = torch.device("cpu")
T = TypeVar("T")


class Numbers(Dataset[Any]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return index


class Noisy(Numbers):
    """Each sample with a random number of its own."""

    def __getitem__(self, index: int) -> Any:
        return index, random.random()


class Where(Numbers):
    """Which process read the sample."""

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        return index, -1 if info is None else info.id


class Stream(IterableDataset[Any]):
    """A stateful stream that starts again at its end."""

    def __init__(self, count: int = 10, item: Callable[[int], Any] = lambda number: number) -> None:
        self.count, self.item, self.next = count, item, 0

    def __iter__(self) -> Iterator[Any]:
        while self.next < self.count:
            self.next += 1
            yield self.item(self.next - 1)
        self.next = 0

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


def train(loader: Loader, count: int | None = None) -> list[Batch]:
    """Takes batches as `run.steps` does: `offset` counts those that are done. Leaves the pass after `count`."""
    batches: list[Batch] = []
    if count == 0:
        return batches
    for batch in loader.training_pass():
        batches.append(batch)
        loader.offset += 1
        if count is not None and len(batches) == count:
            break
    return batches


def samples(batches: list[Batch]) -> list[list[int]]:
    """The samples that count."""
    return [batch.data.tolist()[: batch.num_samples] for batch in batches]


def flat(lists: Iterable[list[T]]) -> list[T]:
    return [item for part in lists for item in part]


# -- the same batches on any number of workers ------------------------------------------------------------------------


@settings(max_examples=30)
@given(
    count=st.integers(1, 40),
    batch_size=st.integers(1, 4),
    world_size=st.integers(1, 4),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
)
def test_workers_shares_make_the_global_batches_of_one_worker(
    make_loader: MakeLoader, count: int, batch_size: int, world_size: int, shuffle: bool, drop_last: bool
) -> None:
    def loader(rank: int, world_size: int) -> Loader:
        options = {"batch_size": batch_size * world_size_, "shuffle": shuffle, "drop_last": drop_last}
        return make_loader(DataLoader(Numbers(count), **options), rank, world_size, seed=4)

    world_size_ = world_size
    alone = loader(0, 1)
    expected = [samples(train(alone)), samples(train(alone))]  # two passes
    loaders = [loader(rank, world_size) for rank in range(world_size)]
    for batches in expected:
        shares = [samples(train(each)) for each in loaders]
        assert [flat(parts) for parts in zip(*shares, strict=True)] == batches
    assert drop_last or sorted(flat(expected[0])) == list(range(count))


@settings(max_examples=30)
@given(count=st.integers(0, 20), batch_size=st.integers(1, 6), world_size=st.integers(1, 4), even_calls=st.booleans())
def test_evaluation_sees_every_sample_exactly_once(
    make_loader: MakeLoader, count: int, batch_size: int, world_size: int, even_calls: bool
) -> None:
    """Whatever divides or does not; with `even_calls` every worker sees as many batches, some of them empty."""
    passes = []
    for rank in range(world_size):
        loader = make_loader(DataLoader(Numbers(count), batch_size=batch_size), rank, world_size, even_calls=even_calls)
        passes.append([batch.tolist() for batch in loader])
    assert sorted(flat([flat(batches) for batches in passes])) == list(range(count))
    if even_calls:
        assert len({len(batches) for batches in passes}) == 1
    else:
        assert all(batch for batches in passes for batch in batches)


def test_evaluation_is_the_same_every_time_and_moves_no_training(make_loader: MakeLoader) -> None:
    loader = make_loader(DataLoader(Noisy(6), batch_size=4, shuffle=True))
    first = [part.tolist() for batch in loader for part in batch]
    train(loader, 1)
    before = loader.state_dict()
    assert [part.tolist() for batch in loader for part in batch] == first
    assert loader.state_dict() == before


def test_an_evaluation_pass_stands_within_what_it_was_given_and_shows_that_it_lives(make_loader: MakeLoader) -> None:
    calls: list[str] = []
    heart = Heart(None)

    @contextmanager
    def evaluating() -> Iterator[None]:
        calls.append("before")
        yield
        calls.append("after")

    loader = make_loader(DataLoader(Numbers(4), batch_size=2), heart=heart, evaluating=evaluating)
    for _ in loader:
        assert calls == ["before"] and heart.phase == VALIDATION
    train(loader)
    assert calls == ["before", "after"]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_augmentation_is_the_same_on_any_number_of_workers(make_loader: MakeLoader, world_size: int) -> None:
    def loader(rank: int, world_size: int) -> Loader:
        return make_loader(DataLoader(Noisy(8), batch_size=4, shuffle=True), rank, world_size)

    def draws(loaders: list[Loader]) -> dict[int, float]:
        batches = [batch.data for each in loaders for batch in train(each)]
        return {int(i): float(value) for indices, values in batches for i, value in zip(indices, values, strict=True)}

    expected = draws([loader(0, 1)])
    assert len(expected) == 8
    assert draws([loader(rank, world_size) for rank in range(world_size)]) == expected


# -- weights ----------------------------------------------------------------------------------------------------------


def test_an_uneven_last_batch_is_weighted_by_its_samples(make_loader: MakeLoader) -> None:
    """7 samples in batches of 4 on 2 workers: the last has 2 and 1."""
    first, second = (train(make_loader(DataLoader(Numbers(7), batch_size=4), rank, 2)) for rank in range(2))
    assert [batch.weight for batch in first] == [1.0, pytest.approx(4 / 3)]
    assert [batch.weight for batch in second] == [1.0, pytest.approx(2 / 3)]
    assert [batch.num_global for batch in first] == [4, 3]


@given(count=st.integers(1, 30), world_size=st.integers(1, 5))
def test_weights_make_the_mean_over_workers_that_over_samples(
    make_loader: MakeLoader, count: int, world_size: int
) -> None:
    options = {"batch_size": 2 * world_size, "shuffle": True}
    ranks = [train(make_loader(DataLoader(Numbers(count), **options), rank, world_size)) for rank in range(world_size)]
    for parts, (whole,) in zip(
        zip(*ranks, strict=True),
        zip(train(make_loader(DataLoader(Numbers(count), **options))), strict=True),
        strict=True,
    ):
        averaged = sum(part.weight * part.data.double().mean() for part in parts) / world_size
        assert averaged == pytest.approx(float(whole.data.double().mean()))


def test_a_worker_without_a_share_stands_in_with_weight_nothing(make_loader: MakeLoader) -> None:
    batches = [train(make_loader(DataLoader(Numbers(5), batch_size=4), rank, 4))[-1] for rank in range(4)]
    assert [batch.num_samples for batch in batches] == [1, 0, 0, 0]
    assert [batch.weight for batch in batches] == [4.0, 0.0, 0.0, 0.0]
    assert [batch.data.tolist() for batch in batches] == [[4]] * 4


def test_a_dropped_last_batch_is_dropped_on_every_worker(make_loader: MakeLoader) -> None:
    for rank in range(2):
        loader = make_loader(DataLoader(Numbers(7), batch_size=4, drop_last=True), rank, 2)
        assert len(train(loader)) == len(loader) == 1


@pytest.mark.parametrize(("batch_size", "advice"), [(6, "use 4 or 8"), (3, "use 4 or 4"), (9, "use 8 or 12")])
def test_a_batch_that_does_not_divide_is_refused_with_ones_that_do(
    make_loader: MakeLoader, batch_size: int, advice: str
) -> None:
    loader = make_loader(DataLoader(Numbers(20), batch_size=batch_size), 0, 4)
    with pytest.raises(DataError) as error:
        next(loader.training_pass())
    assert f"a batch of {batch_size} does not divide between 4 workers" in str(error.value)
    assert advice in str(error.value)
    assert "or another number of workers" in str(error.value)


# -- samplers ---------------------------------------------------------------------------------------------------------


def test_a_weighted_sampler_draws_the_same_on_any_number_of_workers(make_loader: MakeLoader) -> None:
    def loader(rank: int = 0, world_size: int = 1) -> Loader:
        sampler = WeightedRandomSampler([1.0, 0.0, 3.0], num_samples=40)
        return make_loader(DataLoader(Numbers(3), batch_size=8, sampler=sampler), rank, world_size)

    expected = samples(train(loader()))
    shares = [samples(train(loader(rank, 2))) for rank in range(2)]
    assert [a + b for a, b in zip(*shares, strict=True)] == expected
    assert set(flat(expected)) == {0, 2}
    again = loader()
    train(again)
    assert samples(train(again)) != expected


def test_a_weighted_sampler_with_more_draws_than_samples_ends_evenly(make_loader: MakeLoader) -> None:
    """The last batch has one sample for two workers: the other stands in with it."""
    data = TensorDataset(torch.arange(3))

    def loader(rank: int) -> Loader:
        sampler = WeightedRandomSampler([1.0, 1.0, 1.0], num_samples=9)
        return make_loader(DataLoader(data, batch_size=4, sampler=sampler), rank, 2)

    last = [train(loader(rank))[-1] for rank in range(2)]
    assert [batch.num_samples for batch in last] == [1, 0]
    assert last[0].data[0].tolist() == last[1].data[0].tolist()


@pytest.mark.parametrize("count", [8, 9])
@pytest.mark.parametrize("in_second_pass", [False, True])
@pytest.mark.parametrize("done", range(6))
def test_a_stateful_sampler_resumes_where_it_was(
    make_loader: MakeLoader, count: int, in_second_pass: bool, done: int
) -> None:
    """In one of two passes of 4 batches, or of 4 and a small one: after any batch, the last included."""

    def loader() -> Loader:
        return make_loader(DataLoader(Numbers(count), batch_size=2, sampler=Countdown(count)))

    whole = loader()
    expected = [samples(train(whole)), samples(train(whole))]
    saved = loader()
    if in_second_pass:
        train(saved)
    train(saved, done)
    resumed = loader()
    resumed.load_state_dict(saved.state_dict())
    rest = [[], expected[1][done:]] if in_second_pass else [expected[0][done:], expected[1]]
    assert [samples(train(resumed)) for _ in range(2)] == rest


class Unsized(Countdown):
    def __len__(self) -> int:
        raise TypeError("unknown")


def distributed(count: int) -> Sampler[int]:
    """At its end it does not begin again by itself, but when it is next iterated over."""
    return StatefulDistributedSampler(Numbers(count), num_replicas=1, rank=0, shuffle=False)  # type: ignore[no-any-return]


@pytest.mark.parametrize("sampler", [Countdown, Unsized, distributed])
@pytest.mark.parametrize("count", [8, 9])
@pytest.mark.parametrize("to_the_end", [False, True], ids=["last batch", "after the pass"])
def test_an_epoch_of_a_stateful_sampler_begins_whole_after_a_resume(
    make_loader: MakeLoader, sampler: Callable[[int], Sampler[int]], count: int, to_the_end: bool
) -> None:
    def loader() -> Loader:
        return make_loader(DataLoader(Numbers(count), batch_size=2, sampler=sampler(count)))

    saved = loader()
    expected = samples(train(saved, None if to_the_end else -(-count // 2)))
    for is_new_epoch in (False, True):
        resumed = loader()
        resumed.load_state_dict(saved.state_dict())
        if is_new_epoch:
            resumed.begin_epoch()
        else:
            assert train(resumed) == []
        assert samples(train(resumed)) == expected
        assert samples(train(resumed)) == expected


@pytest.mark.parametrize("done", [1, 3])
def test_a_sampler_that_was_left_early_goes_on_as_it_would_after_a_resume(make_loader: MakeLoader, done: int) -> None:
    """Whatever the DataLoader's worker had fetched ahead."""

    def loader() -> Loader:
        options: dict[str, Any] = {"num_workers": 1, "prefetch_factor": 4}
        return make_loader(DataLoader(Numbers(20), batch_size=2, sampler=Countdown(20), **options))

    left = loader()
    train(left, done)
    resumed = loader()
    resumed.load_state_dict(left.state_dict())
    resumed.begin_epoch()
    assert samples(train(resumed)) == samples(train(left)) == [[19 - i, 18 - i] for i in range(2 * done, 20, 2)]


def test_fetching_ahead_does_not_move_the_place_that_is_saved(make_loader: MakeLoader) -> None:
    def loader() -> Loader:
        source = DataLoader(Numbers(20), batch_size=2, sampler=Countdown(20), num_workers=1, prefetch_factor=4)
        return make_loader(source)

    ahead = loader()
    taken = samples(train(ahead, 2))
    assert taken == [[19, 18], [17, 16]]
    resumed = make_loader(DataLoader(Numbers(20), batch_size=2, sampler=Countdown(20)))
    resumed.load_state_dict(ahead.state_dict())
    assert samples(train(resumed, 1)) == [[15, 14]]


# -- resuming ---------------------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(done=st.integers(0, 5), shuffle=st.booleans(), before=st.integers(1, 3), after=st.integers(1, 3))
def test_a_pass_is_resumed_in_its_middle_at_any_number_of_workers(
    make_loader: MakeLoader, done: int, shuffle: bool, before: int, after: int
) -> None:
    def loader(rank: int, world_size: int) -> Loader:
        return make_loader(DataLoader(Noisy(33), batch_size=6, shuffle=shuffle), rank, world_size)

    def both(batch: Batch) -> list[tuple[int, float]]:
        indices, values = batch.data
        return list(zip(indices.tolist(), values.tolist(), strict=True))[: batch.num_samples]

    expected = [both(batch) for batch in train(loader(0, 1))]
    saved = loader(0, before)
    train(saved, done)
    state = saved.state_dict()
    shares = []
    for rank in range(after):
        resumed = loader(rank, after)
        resumed.load_state_dict(state)
        assert resumed.resumes_here == (done > 0)
        shares.append([both(batch) for batch in train(resumed)])
    assert [flat(parts) for parts in zip(*shares, strict=True)] == expected[done:]


def test_several_passes_an_epoch_resume_in_the_one_that_was_under_way(make_loader: MakeLoader) -> None:
    def loader() -> Loader:
        return make_loader(DataLoader(Numbers(8), batch_size=2, shuffle=True))

    whole = loader()
    expected = [samples(train(whole)) for _ in range(3)]
    assert len({str(one) for one in expected}) == 3
    saved = loader()
    train(saved)
    train(saved, 3)
    resumed = loader()
    resumed.load_state_dict(saved.state_dict())
    assert not resumed.resumes_here
    assert train(resumed) == []
    assert resumed.resumes_here
    assert samples(train(resumed)) == expected[1][3:]
    assert samples(train(resumed)) == expected[2]


def test_a_pass_that_was_left_early_is_not_gone_back_to(make_loader: MakeLoader) -> None:
    loader = make_loader(DataLoader(Numbers(8), batch_size=2, shuffle=True))
    train(loader, 1)
    again = make_loader(DataLoader(Numbers(8), batch_size=2, shuffle=True))
    train(again)
    assert samples(train(loader)) == samples(train(again))


def test_an_epoch_of_its_own_begins_a_new_pass_after_a_resume(make_loader: MakeLoader) -> None:
    """Saved between two epochs: the epoch that was done is not gone back to, and the next one is not left out."""

    def loader() -> Loader:
        return make_loader(DataLoader(Numbers(8), batch_size=2, shuffle=True))

    whole = loader()
    expected = [samples(train(whole)) for _ in range(2)]
    saved = loader()
    saved.begin_epoch()
    train(saved)
    resumed = loader()
    resumed.load_state_dict(saved.state_dict())
    resumed.begin_epoch()
    assert samples(train(resumed)) == expected[1]
    assert (resumed.passes, resumed.calls, resumed.offset) == (2, 1, 4)


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_an_epoch_of_a_stream_begins_a_new_pass_after_a_resume(make_loader: MakeLoader, kind: Any) -> None:
    saved = make_loader(kind(Stream(), batch_size=4))
    saved.begin_epoch()
    expected = samples(train(saved))
    resumed = make_loader(kind(Stream(), batch_size=4))
    resumed.load_state_dict(saved.state_dict())
    resumed.begin_epoch()
    assert samples(train(resumed)) == expected
    assert (resumed.passes, resumed.calls, resumed.offset) == (2, 1, 3)


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_a_streams_pass_that_was_done_is_not_done_again(make_loader: MakeLoader, kind: Any) -> None:
    """Saved later in the same epoch, in the steps of another loader."""
    saved = make_loader(kind(Stream(), batch_size=4))
    expected = samples(train(saved))
    resumed = make_loader(kind(Stream(), batch_size=4))
    resumed.load_state_dict(saved.state_dict())
    assert train(resumed) == []
    assert samples(train(resumed)) == expected


def test_an_untouched_loader_can_be_saved_and_resumed(make_loader: MakeLoader) -> None:
    state = make_loader(DataLoader(Numbers(4), batch_size=2)).state_dict()
    resumed = make_loader(DataLoader(Numbers(4), batch_size=2))
    resumed.load_state_dict(state)
    assert samples(train(resumed)) == [[0, 1], [2, 3]]


# -- streams ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize("done", [1, 2, 3])
def test_a_stateful_stream_resumes_in_the_middle(make_loader: MakeLoader, kind: Any, done: int) -> None:
    expected = samples(train(make_loader(kind(Stream(), batch_size=4))))
    assert expected == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    saved = make_loader(kind(Stream(), batch_size=4))
    train(saved, done)
    resumed = make_loader(kind(Stream(), batch_size=4))
    resumed.load_state_dict(saved.state_dict())
    assert samples(train(resumed)) == expected[done:]
    assert samples(train(resumed)) == expected


def test_a_stateful_loader_with_workers_resumes_a_stream(make_loader: MakeLoader) -> None:
    def loader() -> Loader:
        return make_loader(StatefulDataLoader(Stream(20), batch_size=4, num_workers=1, prefetch_factor=2))

    saved = loader()
    pass_ = saved.training_pass()
    for _ in range(2):
        next(pass_)
        saved.offset += 1
    resumed = loader()
    resumed.load_state_dict(saved.state_dict())
    assert samples(train(resumed)) == [[8, 9, 10, 11], [12, 13, 14, 15], [16, 17, 18, 19]]


def test_workers_divide_a_stream(make_loader: MakeLoader) -> None:
    first, second = (train(make_loader(DataLoader(Stream(9), batch_size=4), rank, 2)) for rank in range(2))
    assert samples(first) == [[0, 1], [4, 5], [8]]
    assert samples(second) == [[2, 3], [6, 7], []]
    assert second[-1].data.tolist() == [8] and second[-1].weight == 0.0


def test_a_streams_batch_comes_as_it_was_collated(make_loader: MakeLoader) -> None:
    """Samples of unlike lengths in a list: each whole, though the first is the shortest."""
    stream = Stream(4, item=lambda number: torch.full((number + 1,), number))
    (batch,) = train(make_loader(DataLoader(stream, batch_size=4, collate_fn=list)))
    assert [part.tolist() for part in batch.data] == [[0], [1, 1], [2, 2, 2], [3, 3, 3, 3]]
    assert (batch.num_samples, batch.num_global) == (4, 4)


def test_workers_divide_a_streams_samples_not_their_insides(make_loader: MakeLoader) -> None:
    def batches(rank: int) -> list[Batch]:
        stream = Stream(4, item=lambda number: torch.full((3,), number))
        return train(make_loader(DataLoader(stream, batch_size=4, collate_fn=list), rank, 2))

    parts = [[part.tolist() for part in batch.data] for rank in range(2) for batch in batches(rank)]
    assert parts == [[[0, 0, 0], [1, 1, 1]], [[2, 2, 2], [3, 3, 3]]]


def test_a_streams_arrays_are_batches_too(make_loader: MakeLoader) -> None:
    (batch,) = train(make_loader(DataLoader(Stream(4), batch_size=4, collate_fn=np.array)))
    assert batch.data.tolist() == [0, 1, 2, 3]
    assert batch.weight == 1.0


def pairs(count: int) -> Stream:
    """A stream that makes its batches itself."""
    return Stream(count, item=lambda number: {"x": torch.tensor([2 * number, 2 * number + 1]), "names": ["a", "b"]})


def test_batches_that_a_stream_makes_itself_are_divided(make_loader: MakeLoader) -> None:
    parts = [train(make_loader(DataLoader(pairs(2), batch_size=None), rank, 2)) for rank in range(2)]
    assert [[batch.data["x"].tolist() for batch in part] for part in parts] == [[[0], [2]], [[1], [3]]]
    assert [part[0].data["names"] for part in parts] == [["a"], ["b"]]
    alone = train(make_loader(DataLoader(pairs(2), batch_size=None)))
    assert [(batch.data["x"].tolist(), batch.num_samples) for batch in alone] == [([0, 1], 2), ([2, 3], 2)]


@pytest.mark.parametrize(
    ("item", "found"),
    [(lambda number: {"text": "a"}, "it has no tensors"), (lambda _: (torch.ones(2), torch.ones(3)), "have 2 and 3")],
)
def test_batches_that_cannot_be_divided_are_refused_on_several_workers(
    make_loader: MakeLoader, item: Callable[[int], Any], found: str
) -> None:
    (batch,) = train(make_loader(DataLoader(Stream(1, item), batch_size=None)))
    assert batch.weight == 1.0
    with pytest.raises(DataError, match=f"{found}.*let the data set give single samples"):
        train(make_loader(DataLoader(Stream(1, item), batch_size=None), 0, 2))


@pytest.mark.parametrize("even_calls", [False, True])
def test_evaluation_on_a_stream_sees_every_sample_exactly_once(make_loader: MakeLoader, even_calls: bool) -> None:
    parts = [make_loader(DataLoader(Stream(5), batch_size=4), rank, 2, even_calls=even_calls) for rank in range(2)]
    assert [[batch.tolist() for batch in part] for part in parts] == [[[0, 1], [4]], [[2, 3], []][: 1 + even_calls]]


@pytest.mark.parametrize("options", [{}, {"num_workers": 1, "prefetch_factor": 4}])
@pytest.mark.parametrize("done", [1, 2])
def test_a_stream_that_was_left_early_goes_on_as_it_would_after_a_resume(
    make_loader: MakeLoader, options: dict[str, Any], done: int
) -> None:
    def loader() -> Loader:
        return make_loader(StatefulDataLoader(Stream(18), batch_size=4, **options))

    left = loader()
    train(left, done)
    state = left.state_dict()
    resumed = loader()
    resumed.load_state_dict(state)
    resumed.begin_epoch()
    assert flat(samples(train(resumed))) == flat(samples(train(left))) == list(range(4 * done, 18))


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_a_stream_that_was_left_at_its_last_batch_begins_again(make_loader: MakeLoader, kind: Any) -> None:
    loader = make_loader(kind(Stream(), batch_size=4))
    expected = samples(train(loader, 3))
    assert samples(train(loader)) == expected


def test_the_users_own_stream_loader_stays_as_it_is(make_loader: MakeLoader) -> None:
    mine: DataLoader[Any] = DataLoader(Stream(2), batch_size=2)
    train(make_loader(mine))
    assert [batch.tolist() for batch in mine] == [[0, 1]]


def test_a_checkpoint_of_other_data_is_refused(make_loader: MakeLoader) -> None:
    stream, numbers = make_loader(DataLoader(Stream(), batch_size=2)), make_loader(DataLoader(Numbers(4), batch_size=2))
    with pytest.raises(DataError, match=r"no place in the stream Stream.*use another --name"):
        stream.load_state_dict(numbers.state_dict())
    with pytest.raises(DataError, match="a sampler or a stream that this DataLoader lacks; use another --name"):
        numbers.load_state_dict(stream.state_dict())


class Sized(Stream):
    def __len__(self) -> int:
        return self.count


@pytest.mark.parametrize(("drop_last", "expected"), [(False, 3), (True, 2)])
def test_the_length_of_a_sized_stream_is_that_of_its_pass(
    make_loader: MakeLoader, drop_last: bool, expected: int
) -> None:
    loader = make_loader(DataLoader(Sized(10), batch_size=4, drop_last=drop_last))
    assert len(train(loader)) == expected
    assert len(loader) == expected


def test_a_stream_without_a_length_has_none(make_loader: MakeLoader) -> None:
    loader = make_loader(DataLoader(Stream(), batch_size=4))
    assert loader.num_batches is None
    with pytest.raises(TypeError, match="has no length"):
        len(loader)


class Forgetful(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(4)


@pytest.mark.parametrize(("data", "num_workers"), [(Forgetful(), 0), (Stream(), 1)])
def test_a_stream_whose_place_cannot_be_saved_is_refused(
    make_loader: MakeLoader, data: IterableDataset[int], num_workers: int
) -> None:
    with pytest.raises(DataError) as error:
        make_loader(DataLoader(data, batch_size=2, num_workers=num_workers))
    assert f"the place in the iterable data set {type(data).__name__} cannot be saved" in str(error.value)
    assert "give it state_dict() and load_state_dict() and num_workers=0, or use torchdata's" in str(error.value)


def test_asking_a_stateful_loader_where_it_is_draws_no_random_numbers(make_loader: MakeLoader) -> None:
    """Saving must not change the run: with one more checkpoint the numbers are the same."""
    loader = make_loader(StatefulDataLoader(Stream(), batch_size=4))
    seed_everything(3)
    expected = torch.rand(3)
    seed_everything(3)
    loader.state_dict()
    assert torch.equal(torch.rand(3), expected)


# -- the DataLoader's options -----------------------------------------------------------------------------------------


def test_a_worker_process_with_all_its_options(make_loader: MakeLoader) -> None:
    """num_workers, persistent_workers and prefetch_factor are honoured, on the same samples."""
    source: DataLoader[Any] = DataLoader(
        Noisy(10), batch_size=4, shuffle=True, num_workers=1, persistent_workers=True, prefetch_factor=3
    )
    loader = make_loader(source)
    plain = make_loader(DataLoader(Noisy(10), batch_size=4, shuffle=True))
    for _ in range(2):
        pairs = zip(train(loader), train(plain), strict=True)
        assert all(torch.equal(a, b) for one, other in pairs for a, b in zip(one.data, other.data, strict=True))
    workers = {process.pid for process in loader._source._loader._iterator._workers}  # type: ignore[attr-defined]
    train(loader)
    again = {process.pid for process in loader._source._loader._iterator._workers}  # type: ignore[attr-defined]
    assert workers == again, "persistent_workers: the same process for every pass"
    assert loader._source._loader.prefetch_factor == 3  # type: ignore[attr-defined]


def test_samples_are_read_in_the_worker_process(make_loader: MakeLoader) -> None:
    batches = train(make_loader(DataLoader(Where(4), batch_size=2, num_workers=1)))
    assert [batch.data[1].tolist() for batch in batches] == [[0, 0], [0, 0]]
    assert [batch.data[1].tolist() for batch in train(make_loader(DataLoader(Where(2), batch_size=2)))] == [[-1, -1]]


def test_a_pass_left_early_leaves_nothing_behind_in_a_persistent_worker(make_loader: MakeLoader) -> None:
    options = {"num_workers": 1, "persistent_workers": True, "prefetch_factor": 4}
    loader = make_loader(DataLoader(Numbers(40), batch_size=4, **options))  # type: ignore[arg-type]
    train(loader, 1)
    assert samples(train(loader)) == [list(range(start, start + 4)) for start in range(0, 40, 4)]


def test_a_collate_fn_is_used(make_loader: MakeLoader) -> None:
    batches = train(make_loader(DataLoader(Numbers(5), batch_size=2, collate_fn=lambda part: {"sum": sum(part)})))
    assert [batch.data for batch in batches] == [{"sum": 1}, {"sum": 5}, {"sum": 4}]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_loading_draws_none_of_the_runs_random_numbers(make_loader: MakeLoader, num_workers: int) -> None:
    loader = make_loader(DataLoader(Noisy(4), batch_size=2, shuffle=True, num_workers=num_workers))
    seed_everything(3)
    expected = torch.rand(3), random.random(), np.random.rand()
    seed_everything(3)
    train(loader)
    for _ in loader:
        pass
    assert torch.equal(torch.rand(3), expected[0])
    assert (random.random(), np.random.rand()) == expected[1:]


def test_the_data_set_and_batch_size_stay_in_reach(make_loader: MakeLoader) -> None:
    data = Numbers(10)
    loader = make_loader(DataLoader(data, batch_size=4), rank=1, world_size=2)
    assert loader.dataset is data
    assert (loader.batch_size, len(loader), loader.num_batches) == (4, 3, 3)


def test_resuming_far_into_a_huge_data_set_reads_nothing_before_it(make_loader: MakeLoader) -> None:
    loader = make_loader(DataLoader(Numbers(10**10), batch_size=100))
    state = loader.state_dict()
    loader.load_state_dict({**state, "passes": 1, "calls": 1, "offset": 10**8 - 1})
    began = time.perf_counter()
    assert samples(train(loader)) == [list(range(10**10 - 100, 10**10))]
    assert time.perf_counter() - began < 1.0


# -- nested batches ---------------------------------------------------------------------------------------------------


def test_tensors_are_moved_wherever_they_are() -> None:
    class Movable:
        def to(self, device: torch.device) -> str:
            return f"on {device}"

    meta = torch.device("meta")
    batch = {"a": torch.ones(1), "b": [torch.ones(2), ("text", 3, None)], "c": Pair(torch.ones(3), Movable())}
    moved = move(batch, meta)
    assert moved["a"].device == moved["b"][0].device == moved["c"].x.device == meta
    assert moved["b"][1] == ("text", 3, None)
    assert type(moved["c"]) is Pair and moved["c"].y == "on meta"


@pytest.mark.parametrize(
    "kind", [dict, OrderedDict, lambda items: defaultdict(list, items)], ids=["dict", "OrderedDict", "defaultdict"]
)
def test_mappings_keep_their_kind(kind: Callable[[Any], Any]) -> None:
    batch = kind({"a": torch.arange(4)})
    moved, taken = move(batch, CPU), take(batch, 1, 3)
    assert type(moved) is type(taken) is type(batch)
    assert moved["a"].tolist() == [0, 1, 2, 3] and taken["a"].tolist() == [1, 2]


def test_packed_sequences_are_moved_as_torch_moves_them() -> None:
    """Their lengths stay on the CPU."""
    moved = move(pack_sequence([torch.ones(3), torch.ones(2)]), torch.device("meta"))
    assert moved.data.device.type == "meta"
    assert moved.batch_sizes.device.type == "cpu"


def test_samples_are_taken_from_every_part_of_a_batch() -> None:
    batch = {"x": torch.arange(8).reshape(4, 2), "names": ["a", "b", "c", "d"], "pair": (torch.arange(4), "all")}
    taken = take(batch, 1, 3)
    assert taken["x"].tolist() == [[2, 3], [4, 5]]
    assert taken["names"] == ["b", "c"]
    assert taken["pair"][0].tolist() == [1, 2] and taken["pair"][1] == "all"
    scalar = torch.tensor(5)
    assert take(scalar, 0, 1) is scalar


def test_arrays_are_taken_from_as_tensors_are() -> None:
    assert take({"x": np.arange(4)}, 1, 3)["x"].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (torch.ones(3, 2), 3),
        ({"a": torch.ones(4)}, 4),
        (("text", torch.tensor(1), [torch.ones(5)]), 5),
        (Pair(torch.ones(2), torch.ones(2)), 2),
        ("text", 0),
        ({"x": np.ones((6, 2))}, 6),
    ],
)
def test_the_size_of_a_batch_is_that_of_its_first_tensor(batch: Any, size: int) -> None:
    assert size_of(batch) == size


def test_a_batch_whose_parts_differ_has_no_size() -> None:
    with pytest.raises(DataError, match="its parts have 3 and 4; let its collate_fn"):
        size_of([torch.ones(3), torch.ones(4)])


def test_packed_sequences_are_not_taken_apart() -> None:
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    assert size_of(packed) == 0
    assert take(packed, 0, 1) is packed
