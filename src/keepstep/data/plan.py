"""Which samples step k holds: a pure function, so that a step number is all there is to save and to resume from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from keepstep.errors import DataError
from keepstep.seeding import Words, mix, mix_array

Indices = npt.NDArray[np.int64]

_ROUNDS = 6
_AHEAD = 8192
"""Positions that `Plan.ahead` shuffles at once, about."""


def permute(positions: Indices, size: int, key: int) -> Indices:
    """Maps positions to indices by a keyed bijection of [0, size): a shuffle that is never stored.

    A Feistel network permutes the next power of two above `size`; a position that lands outside is sent
    through again (cycle walking) until it lands inside, less than twice on average. Time and memory are those
    of `positions`, whatever `size` is.
    """
    bits = max(2, (size - 1).bit_length())
    round_keys = [mix(key, number) for number in range(_ROUNDS)]
    values = _feistel(positions.astype(np.uint64), bits, round_keys)
    outside = np.flatnonzero(values >= np.uint64(size))
    while len(outside):
        walked = _feistel(values[outside], bits, round_keys)
        values[outside] = walked
        outside = outside[walked >= np.uint64(size)]
    return values.astype(np.int64)


def _feistel(values: Words, bits: int, round_keys: list[int]) -> Words:
    """Each round changes one half of the bits by what the other half is, which can be undone: so it is a bijection."""
    low_bits = bits // 2
    shift, low_mask, high_mask = (np.uint64(n) for n in (low_bits, (1 << low_bits) - 1, (1 << (bits - low_bits)) - 1))
    high, low = values >> shift, values & low_mask
    for number, round_key in enumerate(round_keys):
        if number % 2:
            low ^= mix_array(round_key, high) & low_mask
        else:
            high ^= mix_array(round_key, low) & high_mask
    return (high << shift) | low


@dataclass(frozen=True)
class Plan:
    """The samples of every global batch of every pass over a data set, and each worker's share of them."""

    num_samples: int
    batch_size: int
    """Of the whole, global batch."""
    shuffle: bool = False
    drop_last: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise DataError(f"batch_size is {self.batch_size}; at least 1 is needed")

    @cached_property
    def num_batches(self) -> int:
        """Global batches in one pass."""
        whole, rest = divmod(self.num_samples, self.batch_size)
        return whole + (1 if rest and not self.drop_last else 0)

    def size(self, batch: int) -> int:
        """Samples in a global batch: `batch_size`, but for the last."""
        start, stop = self._bounds(batch)
        return stop - start

    def global_batch(self, pass_number: int, batch: int) -> Indices:
        """All samples of one global batch, in order."""
        return self._samples(pass_number, *self._bounds(batch))

    def share(self, pass_number: int, batch: int, rank: int, world_size: int) -> Indices:
        """One worker's part of a global batch: the ranks' parts, end to end, are the global batch."""
        start, stop = self._bounds(batch)
        return self._samples(pass_number, *split(start, stop, rank, world_size))

    def ahead(self, pass_number: int, start: int, rank: int, world_size: int) -> Iterator[tuple[int, Indices]]:
        """(batch, `share`) from batch `start` on, worked out for many batches at a time.

        The shuffle is some hundred NumPy calls, whose cost hardly depends on how many positions they are given.
        """
        run = max(1, _AHEAD * world_size // self.batch_size)
        for first in range(start, self.num_batches, run):
            batches = range(first, min(first + run, self.num_batches))
            bounds = [split(*self._bounds(batch), rank, world_size) for batch in batches]
            samples = self._order(
                pass_number, np.concatenate([np.arange(begin, end, dtype=np.int64) for begin, end in bounds])
            )
            at = 0
            for batch, (begin, end) in zip(batches, bounds, strict=True):
                yield batch, samples[at : at + end - begin]
                at += end - begin

    def indices(self, step: int, rank: int = 0, world_size: int = 1) -> Indices:
        """One worker's part of the global batch that makes step `step`, from 0, passes end to end."""
        if self.num_batches == 0:
            raise DataError(f"{self.num_samples} samples make no batch of {self.batch_size}")
        pass_number, batch = divmod(step, self.num_batches)
        return self.share(pass_number, batch, rank, world_size)

    def _bounds(self, batch: int) -> tuple[int, int]:
        if not 0 <= batch < self.num_batches:
            raise IndexError(f"batch {batch} of {self.num_batches}")
        start = batch * self.batch_size
        return start, min(start + self.batch_size, self.num_samples)

    def _samples(self, pass_number: int, start: int, stop: int) -> Indices:
        return self._order(pass_number, np.arange(start, stop, dtype=np.int64))

    def _order(self, pass_number: int, positions: Indices) -> Indices:
        if not self.shuffle:
            return positions
        return permute(positions, self.num_samples, mix(self.seed, pass_number))


def split(start: int, stop: int, rank: int, world_size: int) -> tuple[int, int]:
    """Rank's part of [start, stop): contiguous, sizes differ by one at most, larger ones first."""
    size, extra = divmod(stop - start, world_size)
    begin = start + rank * size + min(rank, extra)
    return begin, begin + size + (1 if rank < extra else 0)
