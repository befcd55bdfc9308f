"""Every world_size-th sample, from the rank on."""

from __future__ import annotations

from collections.abc import Sequence


def share(num_samples: int, rank: int, world_size: int) -> Sequence[int]:
    return range(rank, num_samples, world_size)
