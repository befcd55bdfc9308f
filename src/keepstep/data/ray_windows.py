"""Windows of rows: the order of a stream of blocks, and each batch's rows, worked out without looking at a row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from keepstep.data.plan import Indices, permute
from keepstep.seeding import mix

_MOST_SEGMENTS = 16
"""Into how many segments a pass is divided, at most: a resume reads no more than one of them again."""


class Place(NamedTuple):
    """Where in a pass a window begins."""

    segment: int
    skip: int
    """Rows of the segment that lie before it."""


class Piece(NamedTuple):
    """Rows [begin, end) of a block in Ray's object store."""

    block: Any
    begin: int
    end: int


class Window(NamedTuple):
    """Some consecutive rows of the stream, which are shuffled among each other."""

    place: Place
    pieces: tuple[Piece, ...]
    num_rows: int


@dataclass(frozen=True)
class Cut:
    """How the rows of a data set are put in order and cut into batches: what a place is worth nothing without."""

    batch_size: int
    window_rows: int
    """A multiple of the batch size: no batch lies in two windows."""
    shuffle: bool
    seed: int
    segment_units: int = 32
    """Units that a segment has at least: to begin one takes some 50 ms, in which the cluster has nothing to do."""

    def segments(self, num_units: int, pass_number: int) -> list[Indices]:
        """The input units of a pass, in its order, in segments: only the beginning of one can be jumped to."""
        units = np.arange(num_units, dtype=np.int64)
        if self.shuffle and num_units:
            units = permute(units, num_units, mix(self.seed, pass_number, 0x0B10C5))
        size = max(self.segment_units, -(-num_units // _MOST_SEGMENTS))
        return [units[begin : begin + size] for begin in range(0, num_units, size)]

    def num_batches(self, window: Window, drop_last: bool) -> int:
        whole, rest = divmod(window.num_rows, self.batch_size)
        return whole + (1 if rest and not drop_last else 0)

    def row_order(self, window: Window, pass_number: int) -> Indices:
        """The window's rows in the order in which they are used."""
        rows = np.arange(window.num_rows, dtype=np.int64)
        if not self.shuffle:
            return rows
        return permute(rows, window.num_rows, mix(self.seed, pass_number, *window.place))


def windows(segments: Iterable[tuple[int, Iterable[Piece]]], start: Place, window_rows: int) -> Iterator[Window]:
    """Cuts the pieces of (segment number, pieces) into windows, from `start` on, which is in the first of them.

    By rows, not by blocks: Ray makes blocks of a size as it sees fit, and only the order of rows is the same again.
    """
    held: list[Piece] = []
    place, num_rows = start, 0
    for segment, pieces in segments:
        skip = start.skip if segment == start.segment else 0
        position = 0
        for block, begin, end in pieces:
            position += end - begin
            begin = max(begin, end - max(0, position - skip))
            while begin < end:
                if not held:
                    place = Place(segment, position - (end - begin))
                stop = min(end, begin + window_rows - num_rows)
                held.append(Piece(block, begin, stop))
                num_rows += stop - begin
                begin = stop
                if num_rows == window_rows:
                    yield Window(place, tuple(held), num_rows)
                    held, num_rows = [], 0
    if held:
        yield Window(place, tuple(held), num_rows)
