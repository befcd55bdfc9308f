"""One step of FSDP by hand: all-gather, gradients, reduce-scatter, update."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def fsdp_step(
    shards: list[Tensor], num_weights: int, gradient: Callable[[Tensor, int], Tensor], lr: float
) -> list[Tensor]:
    size, num_workers = len(shards[0]), len(shards)
    weights = torch.cat(shards)[:num_weights]  # all-gather, without what only fills up
    gradients = [gradient(weights, rank) for rank in range(num_workers)]
    filled = F.pad(torch.stack(gradients).mean(0), [0, size * num_workers - num_weights])
    return [shard - lr * part for shard, part in zip(shards, filled.split(size), strict=True)]  # reduce-scatter, update
