"""Where to go on in the data, on another number of workers?"""

from __future__ import annotations

import torch


def order(num_samples: int, seed: int, epoch: int) -> list[int]:
    return torch.randperm(num_samples, generator=torch.Generator().manual_seed(seed + epoch)).tolist()


def remaining(
    num_samples: int, batch_size: int, batches_done: int, rank: int, num_workers: int, seed: int, epoch: int
) -> list[int]:
    # The place is a number of samples, not of a worker's batches: so it means the same to any number of workers.
    return order(num_samples, seed, epoch)[batches_done * batch_size :][rank::num_workers]
