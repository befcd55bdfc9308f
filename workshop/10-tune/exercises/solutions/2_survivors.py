"""nan is neither larger nor smaller than anything: sorted, it stands anywhere."""

from __future__ import annotations

import math


def survivors(values: dict[str, float], keep: int, mode: str) -> set[str]:
    numbers = {name: value for name, value in values.items() if not math.isnan(value)}
    ranked = sorted(numbers, key=lambda name: numbers[name], reverse=mode == "max")
    return set(ranked[: math.ceil(len(values) / keep)])
