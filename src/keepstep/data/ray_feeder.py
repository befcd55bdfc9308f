"""The feeder: one Ray actor that runs the data set, a few windows ahead of the slowest worker, for all of them."""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

from keepstep.data.ray_windows import Cut, Place, Window, windows

_AHEAD = 2
"""Windows that are held ready for the slowest worker."""


class Begin(NamedTuple):
    """Which pass over the data set, and where it goes on: the same on every worker."""

    number: int
    """Counts the passes of this attempt, training and evaluation alike."""
    pass_number: int
    """What the pass is shuffled by."""
    place: Place


class Feeder:
    """Hands out windows: references to blocks, never rows."""

    def __init__(self, dataset: Any, cut: Cut, world_size: int) -> None:
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        warnings.simplefilter("ignore")
        self._dataset, self._cut, self._world_size = dataset, cut, world_size
        self._inputs: Any = None
        self._passes: dict[int, _Pass] = {}
        self._over: set[int] = set()
        """Passes that all workers have left."""
        self._lock = threading.Lock()

    def num_units(self) -> int:
        """How many inputs the data set has: they are listed at the first call, which comes before any other."""
        from keepstep.data.ray_inputs import Inputs

        with self._lock:  # and not in __init__, whose errors would be those of an actor that died
            if self._inputs is None:
                self._inputs = Inputs(self._dataset)
            return int(self._inputs.num_units)

    def window(self, begin: Begin, number: int, rank: int) -> Window | None:
        """The pass's window `number`, from 0 at its place; None behind the last. Waits until it is there."""
        with self._lock:
            if begin.number in self._over:
                return None
            if begin.number not in self._passes:
                self._passes[begin.number] = _Pass(self._windows(begin), self._world_size)
            found = self._passes[begin.number]
        return found.window(number, rank)

    def leave(self, begin: Begin, rank: int) -> None:
        """This worker wants nothing more of the pass."""
        with self._lock:
            found = self._passes.get(begin.number)
            if found is not None and found.leave(rank):
                del self._passes[begin.number]
                self._over.add(begin.number)

    def _windows(self, begin: Begin) -> Iterator[Window]:
        segments = self._cut.segments(self._inputs.num_units, begin.pass_number)
        from_place = range(begin.place.segment, len(segments))
        pieces = ((number, self._inputs.pieces(segments[number].tolist())) for number in from_place)
        return windows(pieces, begin.place, self._cut.window_rows)


class _Pass:
    """One pass under way: a thread makes windows, and each is kept until every worker has it."""

    def __init__(self, source: Iterator[Window], world_size: int) -> None:
        self._taken = dict.fromkeys(range(world_size), 0)
        """Windows that each worker still in the pass has taken."""
        self._ready: dict[int, Window] = {}
        self._num_made = 0
        self._ended = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        threading.Thread(target=self._make, args=(source,), daemon=True).start()

    def window(self, number: int, rank: int) -> Window | None:
        with self._changed:
            if rank not in self._taken:  # it asked ahead, and left before it was heard
                return None
            self._taken[rank] = number
            self._drop_taken()
            self._changed.wait_for(lambda: number < self._num_made or self._ended)
            if number < self._num_made:
                return self._ready[number]
            if self._error is not None:
                raise self._error
            return None

    def leave(self, rank: int) -> bool:
        """True when no worker is left."""
        with self._changed:
            self._taken.pop(rank, None)
            self._drop_taken()
            return not self._taken

    def _drop_taken(self) -> None:
        """A worker that asks for a window has the one before, and holds it for itself."""
        for number in range(min(self._ready, default=0), min(self._taken.values(), default=self._num_made)):
            self._ready.pop(number, None)
        self._changed.notify_all()

    def _make(self, source: Iterator[Window]) -> None:
        try:
            while self._wanted() and (window := next(source, None)) is not None:
                with self._changed:
                    self._ready[self._num_made] = window
                    self._num_made += 1
                    self._changed.notify_all()
        except BaseException as error:  # whatever it is, it is the workers' to report
            self._error = error
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _wanted(self) -> bool:
        """Waits until another window may be made; False when all workers have left."""
        with self._changed:
            self._changed.wait_for(lambda: not self._taken or len(self._ready) <= _AHEAD)
            return bool(self._taken)
