"""Changes bytes and JSON at random, as damage and malice do; the same seed makes the same changes."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

NASTY: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 625, 2**31, 2**63 - 1, 2**63, -(2**63), 10**30, 10**400, 0.5, -0.0, 1e308, 1e999,
    "", "a", "..", "../x", "/etc/passwd", "a\0b", "\ud800", "\x1b[2J", "state.json", "rank_00000.safetensors", "F64",
    [], {}, [[]], [0], [2, 3], [3, 2], [-1], [10**30], {"a": 1}, {"$": "tensor", "key": "model/weight"},
    {"$": "tensor", "key": "absent"}, {"$": "numpy", "array": {"$": "tensor", "key": "model/bias"}}, {"$": "dict"},
    {"$": "tuple", "items": []}, {"$": "set", "items": [{}]}, {"$": "dtype", "name": "load"}, {"$": {}},
]  # fmt: skip


def change_bytes(data: bytes, chance: random.Random) -> bytes:
    begin, end = sorted((chance.randrange(len(data) + 1), chance.randrange(len(data) + 1)))
    end = min(end, begin + 64)
    part = data[begin:end]
    kind = chance.choice(["flip", "truncate", "delete", "duplicate", "insert", "overwrite"])
    if kind == "flip" and data:
        place = chance.randrange(len(data))
        return data[:place] + bytes([data[place] ^ 1 << chance.randrange(8)]) + data[place + 1 :]
    if kind == "truncate":
        return data[:begin]
    if kind == "delete":
        return data[:begin] + data[end:]
    if kind == "duplicate":
        return data[:end] + part + data[end:]
    noise = chance.randbytes(chance.randrange(1, 9))
    return data[:begin] + noise + data[begin + (len(noise) if kind == "overwrite" else 0) :]


def change_json(value: Any, chance: random.Random) -> Any:
    """One to three changes somewhere in it: values deleted, duplicated, swapped, inserted and replaced."""
    for _ in range(chance.randrange(1, 4)):
        places = list(_places(value))
        if not places or chance.random() < 0.02:
            return chance.choice(NASTY)
        holder, key = chance.choice(places)
        other_holder, other_key = chance.choice(places)
        kind = chance.choice(["delete", "swap", "copy", "replace", "replace", "insert", "grow"])
        if kind == "delete":
            del holder[key]
        elif kind == "swap":
            holder[key], other_holder[other_key] = other_holder[other_key], holder[key]
        elif kind == "copy":
            holder[key] = json.loads(json.dumps(other_holder[other_key]))
        elif kind == "replace":
            holder[key] = chance.choice(NASTY)
        elif kind == "grow" and type(holder[key]) in (int, float):
            holder[key] = holder[key] * chance.choice([-1, 2, 3, 10**6]) + chance.choice([0, 1, -1])
        elif isinstance(holder, list):
            holder.insert(chance.randrange(len(holder) + 1), chance.choice(NASTY))
        else:
            holder[str(chance.choice(NASTY))] = chance.choice(NASTY)
        value = json.loads(json.dumps(value))  # a swap may have put a value into itself, which JSON cannot say
    return value


def change_header(path: Path, change: Callable[[Any], Any]) -> None:
    """Changes the JSON of a safetensors file, and its length to fit."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    text = json.dumps(change(json.loads(data[8 : 8 + length]))).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key or number) of every value inside."""
    for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from _places(value[key])
