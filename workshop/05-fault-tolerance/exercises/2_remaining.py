"""Where to go on in the data, on another number of workers?

An epoch was interrupted after `batches_done` global batches of `batch_size` samples each, which were the first of
order(...), whoever trained them. Return the ids that worker `rank` of `num_workers` has to train in the rest of the
epoch: all workers together each of them once, and shared evenly. What stands here skips in each worker's own part.
"""

from __future__ import annotations

import torch


def order(num_samples: int, seed: int, epoch: int) -> list[int]:
    """All samples in the order in which this epoch trains them."""
    return torch.randperm(num_samples, generator=torch.Generator().manual_seed(seed + epoch)).tolist()


def remaining(
    num_samples: int, batch_size: int, batches_done: int, rank: int, num_workers: int, seed: int, epoch: int
) -> list[int]:
    return order(num_samples, seed, epoch)[rank::num_workers][batches_done * batch_size :]
