"""Tells, in microseconds, whether the CPU's random number generators were drawn from."""

from __future__ import annotations

import ctypes
import random
from functools import lru_cache
from typing import Any

import numpy as np
import torch

_MT19937_BYTES = 4 * 624 + 4
"""624 words and a position."""


class Watch:
    """Notes the states of the CPU generators, tells whether they have moved since, and puts them back."""

    __slots__ = ("_numpy_memory", "_numpy_state", "_python", "_torch")

    def __init__(self) -> None:
        self._python: Any = None
        self._torch = torch.empty(0)
        self._numpy_memory: bytes | None = None
        self._numpy_state: Any = None

    def begin(self) -> None:
        """Notes the states. Hot path: once a batch."""
        self._python, self._torch = _python_rng(), torch.default_generator.get_state()
        memory, last = _numpy_memory(), self._numpy_memory
        # Where NumPy's has not moved since the batch before, what was noted then is still good.
        if memory is None or memory != last or self._numpy_state[3]:
            self._numpy_memory, self._numpy_state = memory, np.random.get_state(legacy=True)

    def moved(self) -> bool:
        """Whether any generator was drawn from since."""
        if not torch.equal(torch.default_generator.get_state(), self._torch) or _python_rng() != self._python:
            return True
        if self._numpy_memory is not None and not self._numpy_state[3]:
            return _numpy_memory() != self._numpy_memory
        # A cached normal number can be drawn with nothing else moving.
        now: Any = np.random.get_state(legacy=True)
        return now[2:] != self._numpy_state[2:] or not np.array_equal(now[1], self._numpy_state[1])

    def restore(self) -> None:
        random.setstate(_python_state(self._python))
        np.random.set_state(self._numpy_state)
        torch.default_generator.set_state(self._torch)


def _numpy_memory() -> bytes | None:
    """The memory of NumPy's global generator, whose `get_state` takes 70 us; None where it is not the usual one."""
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
    return bytes(_memory_of(generator)) if type(generator) is np.random.MT19937 else None


@lru_cache(maxsize=1)
def _memory_of(generator: np.random.MT19937) -> memoryview:
    return _view(generator.ctypes.state_address)


def _view(address: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * _MT19937_BYTES).from_address(address)).cast("B")


def _python_rng() -> Any:
    """What tells one state of Python's generator from another; `random.getstate` makes an object of each word."""
    return _python_memory() if _PYTHON_MEMORY_IS_KNOWN else random.getstate()


def _python_state(rng: Any) -> Any:
    """What `random.setstate` takes, from what `_python_rng` gave."""
    return _state_in(*rng) if _PYTHON_MEMORY_IS_KNOWN else rng


def _python_memory() -> tuple[bytes, float | None]:
    """CPython keeps the position and the words right behind the object's header; and one normal number in store."""
    return bytes(_PYTHON_MEMORY), random._inst.gauss_next  # type: ignore[attr-defined]


def _state_in(memory: bytes, normal: float | None) -> Any:
    position, *words = np.frombuffer(memory, np.uint32).tolist()
    return random.Random.VERSION, (*words, position), normal


def _python_memory_is_known() -> bool:
    fits = type(random._inst).__basicsize__ >= object.__basicsize__ + _MT19937_BYTES
    return fits and _state_in(*_python_memory()) == random.getstate()


_PYTHON_MEMORY = _view(id(random._inst) + object.__basicsize__)  # the module keeps it for good
# No promise of Python's, so it is looked at once whether it is so here.
_PYTHON_MEMORY_IS_KNOWN = _python_memory_is_known()
