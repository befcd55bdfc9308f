"""Even in the exponent."""

from __future__ import annotations

import math
import random


def draw(low: float, high: float, num: int, seed: int) -> list[float]:
    source = random.Random(seed)
    return [math.exp(source.uniform(math.log(low), math.log(high))) for _ in range(num)]
