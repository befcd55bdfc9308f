"""Tells, in microseconds, whether the CPU's random number generators were drawn from."""

from __future__ import annotations

import ctypes
import random
from typing import Any, NamedTuple

import numpy as np
import torch

_MT19937_BYTES = 4 * 624 + 4
"""624 words and a position."""


class Generators(NamedTuple):
    """The states of the CPU generators."""

    python: Any
    numpy: Any
    torch: bytes
    numpy_memory: bytes | None

    def moved(self) -> bool:
        """Whether any generator was drawn from since."""
        if self.numpy_memory is None or self.numpy[3]:  # a cached normal number can be drawn with nothing else moving
            now: Any = np.random.get_state(legacy=True)
            numpy_moved = now[2:] != self.numpy[2:] or not np.array_equal(now[1], self.numpy[1])
        else:
            numpy_moved = _numpy_memory() != self.numpy_memory
        return numpy_moved or _torch_rng() != self.torch or _python_rng() != self.python

    def restore(self) -> None:
        random.setstate(_python_state(self.python))
        np.random.set_state(self.numpy)
        torch.set_rng_state(torch.frombuffer(bytearray(self.torch), dtype=torch.uint8))


def generators_now(last: Generators | None) -> Generators:
    """The states now. `last`: of the batch before; where NumPy's has not moved since, it is still good."""
    memory = _numpy_memory()
    if last is not None and memory is not None and memory == last.numpy_memory and not last.numpy[3]:
        numpy_state = last.numpy
    else:
        numpy_state = np.random.get_state(legacy=True)
    return Generators(_python_rng(), numpy_state, _torch_rng(), memory)


def _torch_rng() -> bytes:
    return torch.get_rng_state().numpy().tobytes()


def _numpy_memory() -> bytes | None:
    """The memory of NumPy's global generator, whose `get_state` takes 70 us; None where it is not the usual one."""
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if type(generator) is not np.random.MT19937:
        return None
    return ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)


def _python_rng() -> Any:
    """What tells one state of Python's generator from another; `random.getstate` makes an object of each word."""
    return _python_memory() if _PYTHON_MEMORY_IS_KNOWN else random.getstate()


def _python_state(rng: Any) -> Any:
    """What `random.setstate` takes, from what `_python_rng` gave."""
    return _state_in(*rng) if _PYTHON_MEMORY_IS_KNOWN else rng


def _python_memory() -> tuple[bytes, float | None]:
    """CPython keeps the position and the words right behind the object's header; and one normal number in store."""
    generator: Any = random._inst
    return ctypes.string_at(id(generator) + object.__basicsize__, _MT19937_BYTES), generator.gauss_next


def _state_in(memory: bytes, normal: float | None) -> Any:
    position, *words = np.frombuffer(memory, np.uint32).tolist()
    return random.Random.VERSION, (*words, position), normal


def _python_memory_is_known() -> bool:
    fits = type(random._inst).__basicsize__ >= object.__basicsize__ + _MT19937_BYTES
    return fits and _state_in(*_python_memory()) == random.getstate()


# No promise of Python's, so it is looked at once whether it is so here.
_PYTHON_MEMORY_IS_KNOWN = _python_memory_is_known()
