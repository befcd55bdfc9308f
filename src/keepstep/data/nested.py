"""Batches as collate functions make them: tensors in nested lists, tuples and dicts, moved, counted and divided."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from copy import copy
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from keepstep.errors import DataError

_ARRAYS = (torch.Tensor, np.ndarray)


def move(value: Any, device: torch.device) -> Any:
    """Moves every tensor in nested lists, tuples and dicts, and whatever has a `.to`, to the device."""
    if device.type == "cpu":
        return value  # a DataLoader's batches are there already
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if callable(getattr(value, "to", None)):
        return value.to(device)
    return _rebuild(value, lambda part: move(part, device)) if _is_container(value) else value


def take(value: Any, begin: int, end: int) -> Any:
    """Samples [begin, end) of a collated batch."""
    if isinstance(value, _ARRAYS):
        return value[begin:end] if value.ndim else value
    if _is_list_of_samples(value):
        return value[begin:end]
    return _rebuild(value, lambda part: take(part, begin, end)) if _is_container(value) else value


def in_parts(batch: Any, count: int) -> list[tuple[Any, float]]:
    """The batch in `count` parts, each with its share of the samples; none where it cannot be divided.

    The last, smaller batch may have fewer samples than parts: then one stands in, and counts for nothing.
    """
    size = size_of(batch)
    if count < 1 or size < 1:
        return []
    bounds = [size * number // count for number in range(count + 1)]
    return [
        (take(batch, begin, end) if end > begin else take(batch, 0, 1), (end - begin) / size)
        for begin, end in pairwise(bounds)
    ]


def size_of(batch: Any) -> int:
    """Number of samples in a collated batch: the first dimension of its tensors; 0 where it has none."""
    sizes = sizes_in(batch)
    if len(sizes) > 1:
        raise DataError(
            f"the number of samples in the batch cannot be told: {differing(sizes)}; let its collate_fn give tensors "
            "that have the samples as their first dimension"
        )
    return max(sizes, default=0)


def sizes_in(value: Any) -> set[int]:
    """Every number of samples that a part of a batch seems to have."""
    if isinstance(value, _ARRAYS):
        return {int(value.shape[0])} if value.ndim else set()
    if _is_list_of_samples(value):
        return {len(value)} if value else set()
    if not _is_container(value):
        return set()
    return set().union(*map(sizes_in, value.values() if isinstance(value, Mapping) else value))


def differing(sizes: set[int]) -> str:
    """For an error: what was found where one number of samples was expected."""
    if not sizes:
        return "it has no tensors"
    return f"its parts have {' and '.join(map(str, sorted(sizes)))}"


def _is_list_of_samples(value: Any) -> bool:
    """What default_collate leaves of strings; a list of tensors is one of fields."""
    return isinstance(value, list) and not any(isinstance(part, _ARRAYS) or _is_container(part) for part in value)


def _is_container(value: Any) -> bool:
    # A PackedSequence is a tuple whose tensors do not have the samples first.
    return isinstance(value, (list, tuple, Mapping)) and not isinstance(value, PackedSequence)


def _rebuild(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, Mapping):
        changed = {key: change(part) for key, part in value.items()}
        if type(value) is dict:
            return changed
        if not isinstance(value, MutableMapping):
            return type(value)(changed)  # type: ignore[call-arg]
        rebuilt = copy(value)  # a subclass may need more than its items to be made: a defaultdict does
        rebuilt.update(changed)
        return rebuilt
    parts = [change(part) for part in value]
    if hasattr(value, "_fields"):  # a namedtuple takes its fields one by one
        return type(value)(*parts)
    return type(value)(parts)
