"""Batches by frames: every utterance once an epoch, of about one length, and the same on any number of workers."""

from __future__ import annotations

import numpy as np
import pytest
from batches import STEP, FrameBatches, bucket_length

LENGTHS = np.random.default_rng(0).integers(5, 190, 500).tolist()


def test_an_epoch_has_every_utterance_once_and_no_batch_is_too_large() -> None:
    batches = list(FrameBatches(LENGTHS, 1000))
    assert sorted(index for batch in batches for index in batch) == list(range(500))
    for batch in batches:
        lengths = [LENGTHS[index] for index in batch]
        assert len(batch) * max(lengths) <= 1000
        assert max(lengths) <= STEP * min(lengths)


def test_little_of_a_batch_is_filler() -> None:
    padded = sum(len(batch) * max(LENGTHS[i] for i in batch) for batch in FrameBatches(LENGTHS, 1000))
    assert sum(LENGTHS) / padded > 0.9


def test_epochs_differ_and_seeds_do_too() -> None:
    batches = FrameBatches(LENGTHS, 1000)
    first, second = list(batches), list(batches)
    assert len(first) == len(second) == len(batches)
    assert first != second
    assert {tuple(sorted(batch)) for batch in first} != {tuple(sorted(batch)) for batch in second}
    assert first == list(FrameBatches(LENGTHS, 1000))
    assert first != list(FrameBatches(LENGTHS, 1000, seed=1))


@pytest.mark.parametrize("taken", [0, 3, "all"])
def test_it_goes_on_where_it_was(taken: int | str) -> None:
    one, other = FrameBatches(LENGTHS, 1000), FrameBatches(LENGTHS, 1000)
    taken = len(one) if taken == "all" else taken
    iterator = iter(one)
    for _ in range(int(taken)):
        next(iterator)
    other.load_state_dict(one.state_dict())
    assert list(other) == list(iterator)
    assert list(other) == list(one)  # and the epoch after


def test_frames_weigh_the_same_in_long_and_short_utterances() -> None:
    for length in range(5, 190):
        assert 1 / STEP < bucket_length(length) / length < STEP


def test_bad_input_says_what_to_do() -> None:
    with pytest.raises(ValueError, match="the longest utterance has 30 frames; give --batch-frames 30 or more"):
        FrameBatches([10, 30], 20)
    with pytest.raises(ValueError, match="no utterances"):
        FrameBatches([], 20)
