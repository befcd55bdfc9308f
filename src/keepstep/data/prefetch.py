"""Runs an iterator ahead of its user, in a thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")
_LOOK_S = 0.2
"""How often a thread that waits for room looks whether anybody still wants what it has."""
_END = object()


class _Failed(NamedTuple):
    error: BaseException


def prefetched(items: Iterator[T], depth: int) -> Iterator[T]:
    """The items, up to `depth` of them made before they are asked for; their errors are raised here."""
    ready: queue.Queue[Any] = queue.Queue(depth)
    unwanted = threading.Event()

    def hand_over(item: Any) -> bool:
        while not unwanted.is_set():
            try:
                ready.put(item, timeout=_LOOK_S)
                return True
            except queue.Full:
                continue
        return False

    def work() -> None:
        try:
            if all(map(hand_over, items)):
                hand_over(_END)
        except BaseException as error:  # it is the user's, who is in another thread
            hand_over(_Failed(error))

    threading.Thread(target=work, name="keepstep-prefetch", daemon=True).start()
    try:
        while (item := ready.get()) is not _END:
            if isinstance(item, _Failed):
                raise item.error
            yield item
            del item  # a batch that is held while the next one is waited for is memory that nobody needs
    finally:
        unwanted.set()
