"""Exercise 2: whom to stop.

Write `survivors(values, keep, mode)`: of the trials that came to a rung with these values (name → metric), the names of
the best, one in `keep`, rounded up. `mode` is "max" or "min". A trial whose value is no number (nan) has diverged: it
never goes on, even if fewer are left then.

What stands here forgets something, twice.
"""

from __future__ import annotations

import math


def survivors(values: dict[str, float], keep: int, mode: str) -> set[str]:
    ranked = sorted(values, key=lambda name: values[name], reverse=True)
    return set(ranked[: math.ceil(len(ranked) / keep)])
