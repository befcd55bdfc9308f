"""Requests to stop: a signal to a process of its own, or a word from the supervisor; the loop leaves at a boundary."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from keepstep.observe.heart import Heart

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def signals_kept() -> Iterator[None]:
    """Gives signals back to who had them before: for a call into a library that takes some for itself."""
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, handler)


class StopSignals:
    """Turns the first SIGTERM or Ctrl-C into a request; a second one stops at once."""

    def __init__(self, on_request: Callable[[], None]) -> None:
        self._on_request = on_request
        self._requests = 0
        self._previous: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._handle) for number in _SIGNALS}

    def rearm(self) -> None:
        """A library that the script uses may have taken a signal for itself: Ray does, when it is connected to."""
        for number in self._previous:
            signal.signal(number, self._handle)

    def restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._requests += 1
        if self._requests > 1:
            self.restore()
            raise KeyboardInterrupt
        self._on_request()


class StopRequest:
    """Whether this worker was asked to stop."""

    def __init__(self, heart: Heart, supervised: bool) -> None:
        """`supervised`: a supervisor in another process gets the signals and passes the word on through the heart."""
        self._heart = heart
        self._signalled = False
        self._signals = None if supervised else StopSignals(self._note)

    @property
    def requested(self) -> bool:
        return self._signalled or self._heart.asked_to_stop

    def rearm(self) -> None:
        if self._signals is not None:
            self._signals.rearm()

    def restore(self) -> None:
        if self._signals is not None:
            self._signals.restore()

    def _note(self) -> None:
        self._signalled = True
        print("keepstep: asked to stop: saving at the next step (again: stop at once)", file=sys.stderr, flush=True)
