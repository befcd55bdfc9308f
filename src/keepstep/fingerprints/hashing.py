"""Short hashes of tensors, of this worker's shards of them, and of whatever else a state can hold."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
import xxhash

from keepstep.data.nested import size_of
from keepstep.errors import DataError
from keepstep.fragment import Fragment

DIGITS = 16
"""Of a hash, in hexadecimal."""
_MASK = (1 << 64) - 1
_DEEPEST = 50
"""Levels of a value: what lies deeper may well be the value itself."""


def digest(value: Any) -> str:
    """The hash of a value and everything in it; equal for equal bits."""
    hasher = xxhash.xxh3_64()
    _feed(hasher, value, 0)
    return hasher.hexdigest()


def _feed(hasher: Any, value: Any, depth: int) -> None:
    hasher.update(type(value).__name__.encode())
    if isinstance(value, (torch.Tensor, Fragment)):
        for part in _local_parts(value):
            hasher.update(f"{part.dtype}{tuple(part.shape)}".encode())
            hasher.update(as_bytes(part))
    elif isinstance(value, np.ndarray):
        hasher.update(f"{value.dtype}{value.shape}".encode())
        hasher.update(repr(value.tolist()).encode() if value.dtype.hasobject else value.tobytes())
    elif isinstance(value, (set, frozenset)):
        hasher.update(repr(sorted(map(repr, value))).encode())
    elif isinstance(value, (Mapping, list, tuple, deque)) and depth < _DEEPEST:
        for part in [entry for pair in value.items() for entry in pair] if isinstance(value, Mapping) else value:
            _feed(hasher, part, depth + 1)
    elif value is None or isinstance(value, (bool, int, float, complex, str, bytes, np.generic, torch.dtype)):
        hasher.update(repr(value).encode())


def _local_parts(value: Any) -> Iterator[torch.Tensor]:
    """What this worker holds of a tensor that may be spread over several."""
    if isinstance(value, Fragment):
        yield from value.parts()
    elif hasattr(value, "to_local"):  # fsdp2
        yield value.to_local()
    elif hasattr(value, "local_shards"):  # fsdp
        yield from (shard.tensor for shard in value.local_shards())
    else:
        yield value


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """A tensor's bits, in the host's memory."""
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    flat = tensor.cpu().contiguous().reshape(-1)
    content: Any = flat.view(torch.uint8).numpy() if flat.numel() else b""
    return memoryview(content)


def generator_state(value: Any) -> Any | None:
    """The state of a random number generator; None for anything else."""
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return repr(value.get_state(legacy=False))
    if isinstance(value, random.Random):
        return value.getstate()
    return None


def samples_digest(data: Any, count: int) -> int | None:
    """The sum of the hashes of a batch's first `count` samples: over all workers it does not depend on who had which.

    None where the batch cannot be divided into samples.
    """
    try:
        size = size_of(data)
    except DataError:
        return None
    if size < count:
        return None
    columns = list(_columns(data, size))
    total = 0
    for number in range(count):
        hasher = xxhash.xxh3_64()
        for column in columns:
            hasher.update(column[number])
        total += hasher.intdigest()
    return total & _MASK


def _columns(data: Any, size: int) -> Iterator[list[Any]]:
    """The batch's parts, each as one value a sample."""
    if isinstance(data, torch.Tensor):
        if data.ndim:
            content = as_bytes(data)
            width = len(content) // size
            yield [content[number * width : (number + 1) * width] for number in range(size)]
    elif isinstance(data, np.ndarray):
        if data.ndim:
            yield [digest(row).encode() for row in data]
    elif isinstance(data, Mapping):
        for part in data.values():
            yield from _columns(part, size)
    elif isinstance(data, (list, tuple)):
        if len(data) == size and not any(isinstance(part, (torch.Tensor, np.ndarray, Mapping)) for part in data):
            yield [digest(part).encode() for part in data]
        else:
            for part in data:
                yield from _columns(part, size)


def indices_digest(indices: Any) -> int:
    """The same for the samples' numbers in the data set."""
    hashes: list[int] = [xxhash.xxh3_64_intdigest(str(index).encode()) for index in indices.tolist()]
    return sum(hashes) & _MASK
