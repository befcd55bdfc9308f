"""JSON that every reader takes: NaN and the infinities, which it has no words for, as strings that `float` reads."""

from __future__ import annotations

import math
from typing import Any


def standard(value: Any) -> Any:
    """The value as `json.dumps` should get it: without it a browser or jq cannot read what a diverged run wrote."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {standard(key): standard(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [standard(part) for part in value]
    return value
