"""Verdicts about what the script logs: values that are no numbers, and losses that explode."""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Any

from keepstep.observe.health import Verdict

_REMEMBERED = 50
_LEAST = 20
_EXPLODED = 10.0
_LASTING = 3
"""A single bad batch is no explosion."""


class LossWatch:
    """One attempt's metrics, line by line."""

    def __init__(self) -> None:
        self._history: dict[str, deque[float]] = {}
        self._streak: dict[str, tuple[int, int]] = {}
        """How many values in a row were too large, and the step of the first."""
        self._said: set[str] = set()

    def look(self, lines: list[dict[str, Any]]) -> list[Verdict]:
        found = []
        for line in lines:
            for name, value in line.items():
                if name in ("step", "epoch"):
                    continue
                verdict = self._judge(line["step"], name, float(value))  # JSON has no NaN: it is a word there
                if verdict is not None and name not in self._said:
                    self._said.add(name)
                    found.append(verdict)
        return found

    def _judge(self, step: int, name: str, value: float) -> Verdict | None:
        if not math.isfinite(value):
            advice = "a lower learning rate, run.clip_grad_norm, or a look at that step's samples"
            return Verdict("loss", None, f"{name} is {value} from step {step} on", advice, float(step))
        history = self._history.setdefault(name, deque(maxlen=_REMEMBERED))
        exploded = "loss" in name.lower() and len(history) >= _LEAST and _is_far_above(value, list(history))
        if not exploded:
            self._streak.pop(name, None)
            history.append(value)
            return None
        count, first = self._streak.get(name, (0, step))
        self._streak[name] = count + 1, first
        if count + 1 < _LASTING:
            return None
        usual = statistics.median(history)
        text = f"{name} explodes: {value:.4g} at step {step}, {value / usual:.0f} times what it was before step {first}"
        return Verdict(
            "loss", None, text, "a lower learning rate, a longer warm-up, or run.clip_grad_norm", value / usual
        )


def _is_far_above(value: float, history: list[float]) -> bool:
    median = statistics.median(history)
    spread = statistics.median(abs(each - median) for each in history)
    return median > 0 and value > _EXPLODED * median and value > median + 2 * _EXPLODED * spread
