"""torch's order of samples for a keepstep loader, so that both versions of a lesson can be compared digit for digit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Sampler


class TorchOrder(Sampler[int]):
    """The global batches that `DistributedSampler(seed)` with `set_epoch` makes, each rank's part in one piece.

    keepstep's own `shuffle=True` is as random and needs no sampler. This one exists for comparisons: a model with
    batch norm gives the same losses only if the same samples meet on the same rank.
    """

    def __init__(self, num_samples: int, batch_size: int, num_workers: int, seed: int = 0) -> None:
        self._num_samples, self._batch_size, self._num_workers, self._seed = num_samples, batch_size, num_workers, seed
        self._epoch = self._position = 0

    def __len__(self) -> int:
        return self._num_samples

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self._seed + self._epoch)
        shuffled = torch.randperm(self._num_samples, generator=generator)
        batches = [batch[rank :: self._num_workers] for batch in shuffled.split(self._batch_size)
                   for rank in range(self._num_workers)]  # fmt: skip
        order = torch.cat(batches).tolist()
        while self._position < len(order):
            self._position += 1
            yield order[self._position - 1]
        self._epoch, self._position = self._epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._epoch, self._position = state["epoch"], state["position"]
