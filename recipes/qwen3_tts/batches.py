"""Batches of utterances about as long as each other: a function of the epoch and the batch's number."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from torch.utils.data import Sampler

import keepstep

STEP = 1.12
"""A bucket's utterances differ in length by this factor at most, so that little of a batch is filler."""


class FrameBatches(Sampler[list[int]]):
    """Global batches of at most `max_frames` frames, filler included, in another order each epoch.

    Each bucket of lengths is shuffled and divided by a `Plan`, and so is the order of all batches: with a seed, an
    epoch's k-th batch is the same on any number of workers, and where it stands is two numbers.
    """

    def __init__(self, num_frames: Sequence[int], max_frames: int, seed: int = 0) -> None:
        if not len(num_frames):
            raise ValueError("there are no utterances to make batches of")
        if (longest := max(num_frames)) > max_frames:
            raise ValueError(f"the longest utterance has {longest} frames; give --batch-frames {longest} or more")
        self._buckets = [members for members in bucketed(num_frames) if len(members)]
        self._plans = [
            keepstep.Plan(
                len(members), max_frames // max(num_frames[i] for i in members), shuffle=True, seed=seed + number
            )
            for number, members in enumerate(self._buckets)
        ]
        self._starts = np.cumsum([0] + [plan.num_batches for plan in self._plans])
        self._order = keepstep.Plan(int(self._starts[-1]), 1, shuffle=True, seed=seed)
        self._epoch = 0
        self._taken = 0

    def __len__(self) -> int:
        return self._order.num_batches

    def __iter__(self) -> Iterator[list[int]]:
        while self._taken < len(self):
            self._taken += 1
            yield self.batch(self._epoch, self._taken - 1)
        # Only once the last batch is done with: a state taken right behind it still is this epoch's.
        self._epoch, self._taken = self._epoch + 1, 0

    def batch(self, epoch: int, number: int) -> list[int]:
        """The utterances of an epoch's batch."""
        place = int(self._order.global_batch(epoch, number)[0])
        bucket = int(np.searchsorted(self._starts, place, side="right")) - 1
        within = self._plans[bucket].global_batch(epoch, place - int(self._starts[bucket]))
        return [int(self._buckets[bucket][i]) for i in within]

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "taken": self._taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._epoch, self._taken = state["epoch"], state["taken"]


def bucketed(num_frames: Sequence[int]) -> list[np.ndarray]:
    """Utterances by length: bucket b has those from STEP ** b to STEP ** (b + 1)."""
    which = _bucket(np.asarray(num_frames))
    return [np.flatnonzero(which == b) for b in range(which.min(), which.max() + 1)]


def bucket_length(num_frames: int) -> float:
    """What an utterance's loss is divided by: its bucket's length, so that all frames of all batches weigh the same.

    It is known from the utterance alone; the number of frames in the batch would be known only to all workers together.
    """
    return float(STEP ** (_bucket(np.asarray(num_frames)) + 0.5))


def _bucket(num_frames: np.ndarray) -> np.ndarray:
    return np.floor(np.log(num_frames) / np.log(STEP)).astype(int)
