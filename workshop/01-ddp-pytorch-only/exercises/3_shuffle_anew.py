"""Shuffle anew in every epoch, on every worker alike.

A list of the sample numbers that this worker trains on, for each epoch. What stands here forgets one line of
train_ddp.py. Check: keepstep workshop 1 --check
"""

from __future__ import annotations

from torch.utils.data import DistributedSampler


def orders(num_samples: int, num_epochs: int, rank: int, world_size: int, seed: int) -> list[list[int]]:
    sampler = DistributedSampler(range(num_samples), num_replicas=world_size, rank=rank, seed=seed)
    return [list(sampler) for epoch in range(num_epochs)]
