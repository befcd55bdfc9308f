"""Samplers that tests share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import Sampler


class Countdown(Sampler[int]):
    """A stateful sampler that starts again at its end."""

    def __init__(self, count: int) -> None:
        self.count, self.next = count, 0

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        while self.next < self.count:
            self.next += 1
            yield self.count - self.next
        self.next = 0

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]
