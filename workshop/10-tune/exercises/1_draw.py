"""Exercise 1: draw learning rates to try.

Write `draw(low, high, num, seed)`: `num` learning rates between `low` and `high`, at random but the same ones for the
same seed. Every power of ten between the bounds is to be tried equally often: between 1e-5 and 1e-1 a quarter of the
rates is below 1e-4.

What stands here draws evenly, so that of 1,000 rates about one is below 1e-4.
"""

from __future__ import annotations

import random


def draw(low: float, high: float, num: int, seed: int) -> list[float]:
    source = random.Random(seed)
    return [source.uniform(low, high) for _ in range(num)]
