"""Random streams: each depends on what it is told to, and on nothing else."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keepstep.checkpoint.tree import Tensors, put_together, take_apart
from keepstep.seeding import (
    capture_rng,
    mix,
    mix_array,
    preserved_cpu_rng,
    restore_rng,
    seed_everything,
    seed_sample,
)


def draw() -> tuple[Any, ...]:
    """Something from every generator, twice normal: the second comes out of their caches."""
    return (
        random.random(),
        random.gauss(0, 1),
        random.gauss(0, 1),
        np.random.rand(),
        np.random.randn(),
        np.random.randn(),
        torch.rand(3).tolist(),
        torch.randn(3).tolist(),
    )


@given(st.lists(st.integers(-(2**70), 2**70), min_size=1, max_size=4))
def test_mix_is_64_bits_and_depends_on_its_words_alone(words: list[int]) -> None:
    assert 0 <= mix(*words) < 2**64
    assert mix(*words) == mix(*words)


def test_mix_depends_on_every_word_and_on_their_order() -> None:
    assert len({mix(1, 2), mix(2, 1), mix(1), mix(1, 2, 0), mix(1, 3), mix(0, 2)}) == 6


def test_mix_keeps_its_value_for_good() -> None:
    """Data order and augmentation come from it: another value would break every run that is to be resumed."""
    assert mix(0) == 7960286522194355700
    assert mix(1, 2, 3) == 5246500226706903259
    assert mix_array(7, np.arange(2, dtype=np.uint64)).tolist() == [7191089600892374487, 13647215125184110592]


def test_mix_array_spreads_neighbours_over_all_bits() -> None:
    words = mix_array(5, np.arange(4096, dtype=np.uint64))
    assert len(np.unique(words)) == 4096
    for bit in range(64):
        ones = int(((words >> np.uint64(bit)) & np.uint64(1)).sum())
        assert 1800 < ones < 2300, f"bit {bit} is set in {ones} of 4096"


def test_mix_array_does_not_change_what_it_is_given() -> None:
    words = np.arange(3, dtype=np.uint64)
    mix_array(9, words)
    assert words.tolist() == [0, 1, 2]


def test_seed_everything_seeds_every_generator() -> None:
    seed_everything(3)
    first = draw()
    seed_everything(3)
    assert draw() == first
    seed_everything(4)
    other = draw()
    assert all(a != b for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("seed", [0, -1, 2**32, 2**63, 2**64 - 1])
def test_seed_everything_takes_any_64_bit_seed(seed: int) -> None:
    seed_everything(seed)


def test_seed_sample_seeds_every_cpu_generator() -> None:
    seed_sample(2**64 - 1)
    first = draw()
    seed_sample(2**64 - 1)
    assert draw() == first
    seed_sample(2**64 - 2)
    assert all(a != b for a, b in zip(first, draw(), strict=True))


@given(st.integers(0, 2**64 - 1), st.integers(0, 5))
def test_captured_generators_go_on_where_they_were(seed: int, drawn_before: int) -> None:
    seed_everything(seed)
    for _ in range(drawn_before):
        random.gauss(0, 1), np.random.randn(), torch.randn(1)
    state = capture_rng()
    expected = draw()
    seed_everything(seed ^ 1)
    restore_rng(state)
    assert draw() == expected


def test_a_captured_state_goes_through_a_checkpoint() -> None:
    seed_everything(5)
    random.gauss(0, 1), np.random.randn(), torch.randn(1)
    tensors: Tensors = {}
    text = json.dumps(take_apart(capture_rng(), "rng", tensors))
    expected = draw()
    restore_rng(put_together(json.loads(text), tensors))
    assert draw() == expected


def test_capturing_draws_nothing() -> None:
    seed_everything(6)
    expected = draw()
    seed_everything(6)
    capture_rng()
    assert draw() == expected


def test_preserved_generators_go_on_as_if_nothing_had_been() -> None:
    seed_everything(7)
    expected = draw()
    seed_everything(7)
    with preserved_cpu_rng():
        seed_everything(8)
        draw()
    assert draw() == expected


def test_preserved_generators_are_put_back_after_an_error() -> None:
    seed_everything(9)
    expected = draw()
    seed_everything(9)
    with pytest.raises(KeyError), preserved_cpu_rng():
        draw()
        raise KeyError
    assert draw() == expected


def test_the_keys_of_samples_do_not_repeat() -> None:
    """Over passes and samples: a repeat would give two samples the same augmentation."""
    keys = Counter(
        int(key) for number in range(20) for key in mix_array(mix(0, number), np.arange(500, dtype=np.uint64))
    )
    assert max(keys.values()) == 1
