"""The sampler draws from its seed and its epoch, which it has to be told."""

from __future__ import annotations

from torch.utils.data import DistributedSampler


def orders(num_samples: int, num_epochs: int, rank: int, world_size: int, seed: int) -> list[list[int]]:
    sampler = DistributedSampler(range(num_samples), num_replicas=world_size, rank=rank, seed=seed)
    found = []
    for epoch in range(num_epochs):
        sampler.set_epoch(epoch)
        found.append(list(sampler))
    return found
