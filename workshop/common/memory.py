"""Measures how much memory a training step holds on one worker: all tensors, byte by byte."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Memory(NamedTuple):
    """Bytes of tensors. The interpreter, the libraries and what gloo or NCCL allocate by themselves are not in it."""

    before: int
    """Held between two steps: weights and optimizer state."""
    peak: int
    """The most held within a step: gradients, activations and gathered weights, too."""


def of_step(prepare: Callable[[], Callable[[], None]], device: torch.device) -> Memory:
    """`prepare` makes model and optimizer, and returns a step; its second call is measured."""
    return _on_gpu(prepare, device) if device.type == "cuda" else _on_cpu(prepare)


def _on_gpu(prepare: Callable[[], Callable[[], None]], device: torch.device) -> Memory:
    torch.cuda.synchronize(device)
    empty = torch.cuda.memory_allocated(device)
    step = prepare()
    step()
    gc.collect()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step()
    return Memory(before - empty, torch.cuda.max_memory_allocated(device) - empty)


def _on_cpu(prepare: Callable[[], Callable[[], None]]) -> Memory:
    """A CPU keeps no such books: every operation's results are noted, and added up for as long as they live."""
    with _Books() as books:
        step = prepare()
        step()
        gc.collect()
        before = books.peak = books.held()
        step()
    return Memory(before, books.peak)


class _Books(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._storages: WeakSet[torch.UntypedStorage] = WeakSet()
        self.peak = 0

    def held(self) -> int:
        return sum(storage.nbytes() for storage in self._storages)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # a sharded tensor's own operations on its shard come here next
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":  # which has a size, but no memory
                self._storages.add(tensor.untyped_storage())
        self.peak = max(self.peak, self.held())
        return result
