"""The user's own variables, as they are when a batch is handed out: what a restart does not bring back shows there."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import nn

from keepstep.data.loader import Loader
from keepstep.fingerprints.hashing import digest, generator_state
from keepstep.fingerprints.user_code import file_of_class, is_user_file, short_name

GENERATOR = "g"
"""Stands before the hash of a random number generator."""
_DEEPEST = 3
_MOST = 300
"""Variables of one moment: more are not looked at."""
_MOST_ITEMS = 1000
_LARGE_BYTES = 1 << 24
"""An array of this size is data, most likely: it is not hashed at every step."""
_PLAIN = (type(None), bool, int, float, complex, str, bytes)


class Variables:
    """Looks through the frames of the user's code that have called us, and through the objects in them."""

    def __init__(self, is_saved: Any) -> None:
        """`is_saved(value)`: whether the run itself saves and restores it."""
        self._is_saved = is_saved
        self._hashes: dict[int, tuple[int, int, str]] = {}
        """Tensor → its memory, version and hash: a data set in memory is hashed once."""

    def look(self) -> dict[str, str]:
        """Variable (`file|function or class|name|path`) → hash."""
        found: dict[str, str] = {}
        seen: set[int] = set()
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if is_user_file(frame.f_code.co_filename):
                place = f"{short_name(frame.f_code.co_filename)}|{frame.f_code.co_name}"
                for name, value in list(frame.f_locals.items()):
                    if not name.startswith("__") and len(found) < _MOST:
                        found.update(self._of(value, f"{place}|{name}|", name, 0, seen))
            frame = frame.f_back
        return found

    def _of(self, value: Any, key: str, path: str, depth: int, seen: set[int]) -> Iterator[tuple[str, str]]:
        if isinstance(value, _PLAIN):
            yield key, digest(value)
            return
        if id(value) in seen or isinstance(value, type) or self._is_saved(value):
            return
        seen.add(id(value))
        generator = generator_state(value)
        if generator is not None:
            yield key, GENERATOR + digest(generator)
        elif isinstance(value, torch.Tensor):
            yield key, self._tensor(value)
        elif isinstance(value, np.ndarray):
            if value.nbytes < _LARGE_BYTES:
                yield key, digest(value)
        elif isinstance(value, (list, tuple, dict, set, deque)):
            yield key, self._container(value)
        elif isinstance(value, nn.Module):
            yield key, digest([self._tensor(tensor) for tensor in value.state_dict().values() if _is_tensor(tensor)])
        elif depth < _DEEPEST:
            yield from self._attributes(value, path, depth, seen)

    def _attributes(self, value: Any, path: str, depth: int, seen: set[int]) -> Iterator[tuple[str, str]]:
        if isinstance(value, Loader):
            yield from self._of(value.dataset, "", f"{path}.dataset", depth + 1, seen)
            return
        filename = file_of_class(type(value))
        for name, part in list(vars(value).items()) if filename and hasattr(value, "__dict__") else ():
            key = f"{short_name(filename or '')}|{type(value).__name__}|self.{name}|{path}"
            yield from ((k, h) for k, h in self._of(part, key, f"{path}.{name}", depth + 1, seen) if k)

    def _container(self, value: Any) -> str:
        parts: list[str] = []
        items = [part for pair in value.items() for part in pair] if isinstance(value, dict) else list(value)
        for part in sorted(items, key=repr) if isinstance(value, set) else items[:_MOST_ITEMS]:
            if _is_tensor(part):
                parts.append(self._tensor(part))
            elif isinstance(part, (*_PLAIN, list, tuple, dict, set)):
                parts.append(digest(part))
        return digest([len(items), parts])

    def _tensor(self, tensor: torch.Tensor) -> str:
        if not hasattr(tensor, "data_ptr") or type(tensor) not in (torch.Tensor, nn.Parameter):
            return digest(tensor)
        memory, version = tensor.data_ptr(), tensor._version
        known = self._hashes.get(id(tensor))
        if tensor.nbytes >= _LARGE_BYTES and known is not None and known[:2] == (memory, version):
            return known[2]
        found = digest(tensor)
        if tensor.nbytes >= _LARGE_BYTES:
            self._hashes[id(tensor)] = (memory, version, found)
        return found


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)
