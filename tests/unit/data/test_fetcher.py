"""A sample's random augmentation depends on the seed, the pass and the sample, and on nothing else."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset, TensorDataset, default_collate

from keepstep.data.fetcher import Fetcher, Request, pass_key, sample_uniforms
from keepstep.errors import DataError
from keepstep.seeding import seed_everything

SIZE = 24


class Numbers(Dataset[Any]):
    """Draws nothing."""

    def __init__(self) -> None:
        self.reads: list[int] = []

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        self.reads.append(index)
        return index


class Noisy(Numbers):
    """Draws from every generator."""

    def __getitem__(self, index: int) -> Any:
        self.reads.append(index)
        return index, random.random(), float(np.random.rand()), float(torch.rand(()))


class SometimesNoisy(Noisy):
    """Draws for later samples only."""

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index) if index >= 8 else index


class Batched(Numbers):
    """Reads a batch at once."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return list(zip(indices, sample_uniforms(2).tolist(), strict=True))


def fetch(fetcher: Fetcher, indices: list[int], key: int = 1) -> list[Any]:
    result: list[Any] = fetcher[Request(np.array(indices, dtype=np.int64), key)]
    return result


def as_list(samples: Any) -> Any:
    return list(samples)


def random_numbers() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


groupings = st.permutations(range(SIZE)).flatmap(
    lambda order: st.lists(st.integers(1, SIZE - 1), max_size=5, unique=True).map(
        lambda cuts: [order[a:b] for a, b in zip([0, *sorted(cuts)], [*sorted(cuts), SIZE], strict=True)]
    )
)


@pytest.mark.parametrize(
    "make",
    [
        Noisy,
        SometimesNoisy,
        Batched,
        lambda: Subset(Noisy(), range(SIZE)),
        lambda: ConcatDataset([Subset(Noisy(), range(8)), Noisy()]),
        lambda: Subset(Batched(), range(SIZE)),
        lambda: StackDataset(Noisy(), Subset(Noisy(), range(SIZE))),
    ],
    ids=["noisy", "sometimes", "batched", "subset", "concatenated", "subset of batched", "stacked"],
)
@given(grouping=groupings)
def test_augmentation_does_not_depend_on_how_samples_are_grouped(
    make: Callable[[], Dataset[Any]], grouping: list[list[int]]
) -> None:
    """A subset is what `random_split` gives; another world size, or a resume, is another grouping."""
    fetcher = Fetcher(make(), as_list)
    for batch in grouping:
        alone = [fetch(Fetcher(make(), as_list), [index])[0] for index in batch]
        assert fetch(fetcher, batch) == alone


@pytest.mark.parametrize(
    "draw",
    [random.random, lambda: float(np.random.rand()), lambda: float(torch.rand(()))],
    ids=["python", "numpy", "torch"],
)
def test_each_generator_alone_is_seen_and_seeded(draw: Callable[[], float]) -> None:
    class Draws(Numbers):
        def __getitem__(self, index: int) -> Any:
            return draw()

    fetcher = Fetcher(Draws(), as_list)
    seed_everything(1)
    random_numbers()  # NumPy's first draw makes its whole state anew; later ones move a position in it
    one = fetch(fetcher, [3, 4])
    seed_everything(2)
    assert fetch(fetcher, [4, 3]) == one[::-1]
    assert fetch(Fetcher(Draws(), as_list), [3]) == one[:1]


@pytest.mark.parametrize("make", [Numbers, Noisy, SometimesNoisy, Batched])
def test_the_runs_own_generators_do_not_move(make: Callable[[], Dataset[Any]]) -> None:
    fetcher = Fetcher(make(), as_list)
    seed_everything(1)
    expected = random_numbers()
    seed_everything(1)
    fetch(fetcher, [0, 9])
    fetch(fetcher, [10, 11])
    assert random_numbers() == expected


def test_the_runs_generators_do_not_change_what_a_sample_draws() -> None:
    seed_everything(1)
    one = fetch(Fetcher(Noisy(), as_list), [3, 4])
    seed_everything(2)
    assert fetch(Fetcher(Noisy(), as_list), [3, 4]) == one


def test_samples_and_passes_draw_differently() -> None:
    fetcher = Fetcher(Noisy(), as_list)
    draws = [
        sample[1:] for key in (pass_key(0, 0), pass_key(0, 1), pass_key(1, 0)) for sample in fetch(fetcher, [5, 6], key)
    ]
    assert len({value for draw in draws for value in draw}) == 18


def test_a_data_set_that_draws_nothing_is_read_once_and_unseeded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keepstep.data.fetcher.seed_sample", lambda key: pytest.fail("seeded for nothing"))
    data = Numbers()
    fetcher = Fetcher(data, as_list)
    assert fetch(fetcher, [1, 2]) + fetch(fetcher, [3]) == [1, 2, 3]
    assert data.reads == [1, 2, 3]


def test_a_data_set_that_draws_is_tried_unseeded_once() -> None:
    data = Noisy()
    fetcher = Fetcher(data, as_list)
    fetch(fetcher, [1, 2])
    fetch(fetcher, [3])
    assert data.reads == [1, 2, 1, 2, 3]


def test_tensors_are_not_even_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keepstep.data.fetcher.Watch.begin", lambda *_: pytest.fail("looked at the generators"))
    tensors = TensorDataset(torch.arange(4))
    fetcher = Fetcher(ConcatDataset([tensors, Subset(tensors, [1, 3])]), default_collate)
    assert fetch(fetcher, [0, 4, 5])[0].tolist() == [0, 1, 3]


def test_tensors_are_collated_as_torch_collates_them() -> None:
    tensors = TensorDataset(torch.arange(12).reshape(6, 2), torch.arange(6, dtype=torch.uint8), torch.rand(6, 1, 2))
    indices = [4, 0, 4]
    found = fetch(Fetcher(tensors, default_collate), indices)
    expected = default_collate([tensors[index] for index in indices])
    assert type(found) is type(expected) and len(found) == len(expected) == 3
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(found, expected, strict=True))
    found[0].zero_()
    assert tensors.tensors[0][4].tolist() == [8, 9], "a batch may be written to: the data set stays as it is"


@pytest.mark.parametrize(
    "normal", [lambda: random.gauss(0, 1), lambda: float(np.random.randn())], ids=["python", "numpy"]
)
def test_a_normal_number_that_is_in_store_is_not_handed_out(normal: Callable[[], float]) -> None:
    """Normal numbers are made in pairs: the second one moves nothing but a cache."""

    class Normal(Numbers):
        def __getitem__(self, index: int) -> Any:
            return normal()

    fetcher = Fetcher(Normal(), as_list)
    seed_everything(1)
    expected = fetch(Fetcher(Normal(), as_list), [3])
    for _ in range(2):  # also when the batch before left everything as it was
        seed_everything(2)
        normal()
        assert fetch(fetcher, [3]) == expected
        in_store = normal()
        seed_everything(2)
        normal()
        assert normal() == in_store


def test_a_subclass_of_a_tensor_data_set_may_draw() -> None:
    class Jittered(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            return super().__getitem__(index)[0] + torch.rand(())

    seed_everything(1)
    one = fetch(Fetcher(Jittered(torch.zeros(4)), as_list), [2])
    seed_everything(2)
    assert fetch(Fetcher(Jittered(torch.zeros(4)), as_list), [2]) == one


def test_the_batch_is_collated() -> None:
    assert fetch(Fetcher(Numbers(), sum), [1, 2, 3]) == 6


def random_mask(samples: list[Any]) -> list[bool]:
    """A collate_fn as masked language models have."""
    return (torch.rand(len(samples)) < 0.5).tolist()


def test_a_collate_fn_that_draws_gives_the_same_after_a_resume() -> None:
    """Its numbers are a function of the batch too: no generator of the run, or of a DataLoader's worker, has a say."""
    samples = list(range(SIZE))
    seed_everything(1)
    one = fetch(Fetcher(Numbers(), random_mask), samples)
    seed_everything(2)
    assert fetch(Fetcher(Numbers(), random_mask), samples) == one
    assert fetch(Fetcher(Numbers(), random_mask), samples, key=2) != one


def test_a_collate_fn_that_draws_leaves_the_runs_generators_alone() -> None:
    seed_everything(1)
    expected = random_numbers()
    seed_everything(1)
    fetch(Fetcher(Numbers(), random_mask), [1, 2])
    assert random_numbers() == expected


def test_uniforms_are_uniform_and_in_range() -> None:
    class Uniforms(Batched):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            return [sample_uniforms(3)]

    (drawn,) = fetch(Fetcher(Uniforms(), as_list), list(range(5000)))
    assert drawn.shape == (5000, 3) and drawn.dtype == torch.float32
    assert drawn.min() >= 0 and drawn.max() < 1
    assert drawn.mean(0).tolist() == pytest.approx([0.5] * 3, abs=0.02)
    assert torch.corrcoef(drawn.T)[0, 1].abs() < 0.05
    assert len(drawn.unique()) > 14_900


def test_no_uniforms_at_all_have_a_shape() -> None:
    class None_(Batched):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            return [sample_uniforms(0)]

    assert fetch(Fetcher(None_(), as_list), [1, 2])[0].shape == (2, 0)


def test_uniforms_outside_a_fetch_are_refused() -> None:
    fetch(Fetcher(Batched(), as_list), [1])
    with pytest.raises(DataError, match="inside a data set's __getitems__"):
        sample_uniforms(1)


def test_uniforms_are_refused_after_a_fetch_that_failed() -> None:
    class Broken(Batched):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            raise KeyError("no such sample")

    with pytest.raises(KeyError):
        fetch(Fetcher(Broken(), as_list), [1])
    with pytest.raises(DataError):
        sample_uniforms(1)


def test_an_error_in_a_noisy_data_set_leaves_the_generators_alone() -> None:
    class Broken(Noisy):
        def __getitem__(self, index: int) -> Any:
            if index == 3:
                raise KeyError(index)
            return super().__getitem__(index)

    fetcher = Fetcher(Broken(), as_list)
    fetch(fetcher, [1])
    seed_everything(1)
    expected = random_numbers()
    seed_everything(1)
    with pytest.raises(KeyError):
        fetch(fetcher, [2, 3])
    assert random_numbers() == expected


def test_an_empty_batch_can_be_asked_for() -> None:
    assert fetch(Fetcher(Noisy(), as_list), []) == []
    assert fetch(Fetcher(Batched(), as_list), []) == []


def test_a_collate_fn_that_changes_its_samples_gets_fresh_ones_when_it_is_tried_again() -> None:
    class Dicts(Numbers):
        def __getitem__(self, index: int) -> Any:
            return {"number": index}

    def drain(samples: list[Any]) -> list[Any]:
        return [(sample.pop("number"), random.random()) for sample in samples]

    assert [number for number, _ in fetch(Fetcher(Dicts(), drain), [3, 4])] == [3, 4]


def test_a_collate_fn_that_draws_does_not_have_its_samples_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[int] = []
    monkeypatch.setattr("keepstep.data.fetcher.seed_sample", keys.append)
    fetch(Fetcher(Numbers(), random_mask), [1, 2, 3])
    assert len(keys) == 1


def test_pythons_generator_is_put_back_where_its_memory_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another Python may keep its state elsewhere: then it is asked for, which is slower."""
    monkeypatch.setattr("keepstep.data.generators._PYTHON_MEMORY_IS_KNOWN", False)
    seed_everything(1)
    expected = random_numbers()
    seed_everything(1)
    fetch(Fetcher(Noisy(), as_list), [1, 2])
    assert random_numbers() == expected
