"""One worker talks to itself: values come back as they are, and as copies; several add up in one order."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from keepstep.collective import Collective
from unit.conftest import RunRanks


@pytest.fixture
def alone() -> Collective:
    return Collective(1, torch.device("cpu"))


@pytest.mark.parametrize("value", [3, 0.1, True, torch.tensor(2), torch.ones(2, 2, dtype=torch.float64), [1, 2]])
def test_the_sum_of_one_is_itself(alone: Collective, value: Any) -> None:
    assert torch.equal(alone.sum(value), torch.as_tensor(value, dtype=alone.sum(value).dtype))


def test_a_python_number_keeps_its_precision(alone: Collective) -> None:
    assert alone.sum(0.1).item() == 0.1
    assert alone.sum(2**60 + 1).item() == 2**60 + 1


def test_the_mean_of_whole_numbers_is_a_fraction(alone: Collective) -> None:
    assert alone.mean(3).dtype == alone.mean(torch.tensor(3)).dtype == torch.float64
    assert alone.mean(torch.tensor(1.5)).dtype == torch.float32


def test_what_comes_back_is_a_copy_without_a_graph(alone: Collective) -> None:
    """An all-reduce writes into its argument: the user's tensor must not change, on one worker or on many."""
    value = torch.ones(2, requires_grad=True)
    for result in (alone.sum(value), alone.gather(value)):
        assert not result.requires_grad
        result.zero_()
    assert value.tolist() == [1.0, 1.0]


def test_gathering_one_number_makes_a_row(alone: Collective) -> None:
    assert alone.gather(torch.tensor(3)).tolist() == [3]
    assert alone.gather(torch.ones(2, 3)).shape == (2, 3)


def test_agreements_of_one(alone: Collective) -> None:
    marker = object()
    assert alone.objects(marker) == [marker] and alone.from_rank0(marker) is marker
    assert alone.rows([1.0, 2.0]) == [[1.0, 2.0]]
    alone.barrier()


def test_a_sum_is_the_same_wherever_in_a_vector_it_is(run_ranks: RunRanks) -> None:
    """How many metrics are summed at once depends on the clock; their last digits must not."""
    parts = [0.1, 1e16, -1e16, 0.7]  # in another order, another sum

    def work(collective: Collective, rank: int) -> list[torch.Tensor]:
        lengths = (1, 2, 3, 5, 8, 33)
        return [collective.sum_on_host(torch.full((n,), parts[rank], dtype=torch.float64)) for n in lengths]

    in_order = ((parts[0] + parts[1]) + parts[2]) + parts[3]
    for sums in run_ranks(4, work):
        assert {value for vector in sums for value in vector.tolist()} == {in_order}
