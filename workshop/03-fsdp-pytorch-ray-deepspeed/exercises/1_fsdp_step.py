"""Make one step of FSDP by hand: all-gather, gradients, reduce-scatter, update. It has a mistake or two: find them.

`shards[rank]` are the weights that worker `rank` keeps: an equal part each, the last ones filled up with zeros where
`num_weights` does not divide. `gradient(weights, rank)` gives the gradient of that worker's own loss with respect to
all `num_weights` weights. Return the shards after `weight -= lr * mean gradient over the workers`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def fsdp_step(
    shards: list[Tensor], num_weights: int, gradient: Callable[[Tensor, int], Tensor], lr: float
) -> list[Tensor]:
    size = len(shards[0])
    updated = []
    for rank, shard in enumerate(shards):
        weights = torch.cat(shards)  # all-gather
        own = gradient(weights, rank)[rank * size : (rank + 1) * size]
        updated.append(shard - lr * own)
    return updated
