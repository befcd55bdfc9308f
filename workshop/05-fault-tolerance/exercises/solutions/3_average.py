"""State of your own that survives a crash."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class Average:
    def __init__(self, weights: Tensor) -> None:
        self.value = weights.clone()
        self.updates = 0

    def update(self, weights: Tensor) -> None:
        self.updates += 1
        decay = min(0.9, self.updates / (10 + self.updates))
        self.value.mul_(decay).add_(weights, alpha=1 - decay)

    def state_dict(self) -> dict[str, Any]:
        # A copy: the checkpoint is written while training goes on. And all that the next update depends on.
        return {"value": self.value.clone(), "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"].clone()
        self.updates = state["updates"]
