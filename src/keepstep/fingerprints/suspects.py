"""Notes where the user's code asks the clock or the operating system for what is never the same twice."""

from __future__ import annotations

import functools
import json
import os
import random
import secrets
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch

from keepstep.fingerprints.user_code import is_user_file, short_name

TIME, ENTROPY = "time", "entropy"
_TIMES = ("time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns")
_FETCHING = "fetcher.py"


def install(folder: Path, rank: int) -> None:
    """From here on calls from the user's code are noted in `suspects_R.jsonl`, each place once."""
    folder.mkdir(parents=True, exist_ok=True)
    # Appended to line by line: a DataLoader's workers, which inherit it, write there as well.
    note = _Notes(os.open(folder / f"suspects_{rank}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644))
    for name in _TIMES:
        _watch(time, name, TIME, note)
    for owner, name in (
        (os, "urandom"),
        (uuid, "uuid1"),
        (uuid, "uuid4"),
        (secrets, "token_bytes"),
        (secrets, "token_hex"),
        (secrets, "randbelow"),
        (secrets, "randbits"),
        (secrets, "choice"),
        (torch, "seed"),
        (torch.random, "seed"),
    ):
        _watch(owner, name, ENTROPY, note)
    seeded: tuple[tuple[Any, str], ...]
    seeded = ((np.random, "default_rng"), (np.random, "seed"), (random, "seed"), (random.Random, "__init__"))
    for place, name in seeded:
        _watch(place, name, ENTROPY, note, only=_is_unseeded)


class _Notes:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._known: set[tuple[str, int, str]] = set()

    def call(self, kind: str, what: str, frame: FrameType) -> None:
        filename, line = frame.f_code.co_filename, frame.f_lineno
        place = (filename, line, what)
        if place in self._known or not is_user_file(filename):
            return
        self._known.add(place)
        entry = {"kind": kind, "what": what, "file": short_name(filename), "line": line, "in_data": _in_data(frame)}
        os.write(self._descriptor, json.dumps(entry).encode() + b"\n")


def _in_data(frame: FrameType | None) -> bool:
    """Whether a sample is being read."""
    while frame is not None:
        path = frame.f_code.co_filename
        if path.endswith(_FETCHING) and not is_user_file(path):
            return True
        frame = frame.f_back
    return False


def _is_unseeded(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    given = [*(args[1:] if name == "__init__" else args), *kwargs.values()]
    return not any(value is not None for value in given)


def _watch(
    owner: Any,
    name: str,
    kind: str,
    notes: _Notes,
    only: Callable[[str, tuple[Any, ...], dict[str, Any]], bool] | None = None,
) -> None:
    call = getattr(owner, name)
    shown = f"{owner.__name__}.{name}"

    @functools.wraps(call)
    def watched(*args: Any, **kwargs: Any) -> Any:
        if only is None or only(name, args, kwargs):
            what = f"random.{type(args[0]).__name__}" if name == "__init__" else shown
            notes.call(kind, what, sys._getframe(1))
        return call(*args, **kwargs)

    setattr(owner, name, watched)
