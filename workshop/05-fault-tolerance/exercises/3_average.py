"""State of your own that survives a crash.

An exponential average of the weights, which run.track("average", Average(weights)) saves and restores. Something is
wrong with it: after a restart the average is not what it would have been. Mend state_dict and load_state_dict.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


class Average:
    def __init__(self, weights: Tensor) -> None:
        self.value = weights.clone()
        self.updates = 0

    def update(self, weights: Tensor) -> None:
        self.updates += 1
        decay = min(0.9, self.updates / (10 + self.updates))  # young averages follow faster
        self.value.mul_(decay).add_(weights, alpha=1 - decay)

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]
