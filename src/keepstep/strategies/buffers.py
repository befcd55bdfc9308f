"""Keeps buffers (BatchNorm's running statistics) the same on every worker, at no cost where none change."""

from __future__ import annotations

import torch
from torch import nn
from torch._C._distributed_c10d import _broadcast_coalesced  # what DDP sends its buffers with
from torch.distributed.distributed_c10d import _get_default_group

_PIECE_BYTES = 256 * 2**20


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
        # Any in-place change bumps a buffer's version, so constant masks are never sent. BatchNorm's kernel bumps none
        # for the statistics but its count of batches is: hence one that changed stands for its module's all.
        changed = [owner for owner in self._owners if _versions(owner) != self._seen[owner]]
        if not changed:
            return
        with torch.no_grad():
            # In one piece a dtype: ResNet-18 has 60 buffers, and each call of its own would take longer than all bytes.
            buffers = [buffer for owner in changed for buffer in _shared(owner)]
            _broadcast_coalesced(_get_default_group(), buffers, _PIECE_BYTES, 0)
        self._seen.update((owner, _versions(owner)) for owner in changed)


def _versions(owner: nn.Module) -> list[tuple[int, int]]:
    return [(id(buffer), buffer._version) for buffer in _shared(owner)]


def _shared(owner: nn.Module) -> list[torch.Tensor]:
    """Buffers of the model's state. Others are caches, which may differ: one worker has seen a longer sequence."""
    named = owner.named_buffers(recurse=False)
    return [buffer for name, buffer in named if name not in owner._non_persistent_buffers_set]
