"""JSON that every reader takes: NaN and the infinities, which it has no words for, as strings that `float` reads."""

from __future__ import annotations

import json
import math
from typing import Any


def to_json(value: Any, **options: Any) -> str:
    """`json.dumps`, but that a browser or jq can read what a diverged run wrote too."""
    try:
        return json.dumps(value, allow_nan=False, **options)
    except ValueError:
        return json.dumps(standard(value), allow_nan=False, **options)


def standard(value: Any) -> Any:
    """The value in words that JSON has."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {standard(key): standard(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [standard(part) for part in value]
    return value
