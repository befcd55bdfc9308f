"""Keeps buffers (BatchNorm's running statistics) the same on every worker, at no cost where none change."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn


class BufferSync:
    """Broadcasts rank 0's buffers where they have changed since the last time.

    DDP does this in forward, which makes forward collective and hangs an evaluation in which workers have unequal
    numbers of batches; FSDP does not do it at all. Done between steps, it is the same for every strategy, and a
    checkpoint never depends on which worker wrote it.
    """

    def __init__(self, module: nn.Module, world_size: int) -> None:
        owners = [owner for owner in module.modules() if _shared(owner)]
        self._owners = owners if world_size > 1 else []
        self._seen = {owner: _versions(owner) for owner in self._owners}

    def sync(self) -> None:
        """Collective: every worker calls it, at the same point of the program."""
        for owner in self._owners:
            # Any in-place change bumps a buffer's version, so constant masks are never sent. BatchNorm's kernel bumps
            # none for the statistics but its count of batches is: hence one that changed stands for its module's all.
            if _versions(owner) == self._seen[owner]:
                continue
            with torch.no_grad():
                for buffer in _shared(owner):
                    dist.broadcast(buffer, src=0)
            self._seen[owner] = _versions(owner)


def _versions(owner: nn.Module) -> list[tuple[int, int]]:
    return [(id(buffer), buffer._version) for buffer in _shared(owner)]


def _shared(owner: nn.Module) -> list[torch.Tensor]:
    """Buffers of the model's state. Others are caches, which may differ: one worker has seen a longer sequence."""
    named = owner.named_buffers(recurse=False)
    return [buffer for name, buffer in named if name not in owner._non_persistent_buffers_set]
