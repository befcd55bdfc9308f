"""What workers say to each other: sums, gathers and agreements, which cost nothing where there is one worker."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


class Collective:
    """Collective operations over all workers; every worker must call each, in the same order."""

    def __init__(self, world_size: int, device: torch.device) -> None:
        self._world_size, self._device = world_size, device
        self.alone = world_size == 1

    def sum(self, value: Any) -> torch.Tensor:
        tensor = self._tensor(value)
        if self._world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def mean(self, value: Any) -> torch.Tensor:
        tensor = self._tensor(value)
        if not (tensor.is_floating_point() or tensor.is_complex()):
            tensor = tensor.double()
        return self.sum(tensor) / self._world_size

    def gather(self, value: Any) -> torch.Tensor:
        """The workers' tensors, end to end along the first dimension, which may differ in length."""
        tensor = self._tensor(value)
        tensor = tensor.reshape(1) if tensor.dim() == 0 else tensor
        if self._world_size == 1:
            return tensor
        length = torch.tensor([tensor.shape[0]], device=self._device)
        lengths = [int(n) for n in self._all_gather(length)]
        padded = tensor.new_zeros((max(lengths), *tensor.shape[1:]))
        padded[: tensor.shape[0]] = tensor
        return torch.cat([part[:n] for part, n in zip(self._all_gather(padded), lengths, strict=True)])

    def rows(self, row: list[float]) -> list[list[float]]:
        """Every worker's row of numbers, in host memory: never touches the GPU."""
        if self._world_size == 1:
            return [row]
        mine = torch.tensor(row, dtype=torch.float64)
        parts = [torch.empty_like(mine) for _ in range(self._world_size)]
        dist.all_gather(parts, mine)
        return [part.tolist() for part in parts]

    def sum_on_host(self, vector: torch.Tensor) -> torch.Tensor:
        """The workers' vectors added up, rank by rank: an all-reduce adds in an order that depends on the place in the
        vector, so that a number's last digit would depend on what else happens to be summed with it."""
        if self._world_size == 1:
            return vector
        first, *others = self._all_gather(vector)
        for part in others:
            first += part
        return first

    def objects(self, value: T) -> list[T]:
        """Every worker's object. Slow: for start-up and rare disagreements."""
        if self._world_size == 1:
            return [value]
        values: list[Any] = [None] * self._world_size
        dist.all_gather_object(values, value)
        return values

    def from_rank0(self, value: T) -> T:
        """Rank 0's object, on every worker."""
        if self._world_size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def barrier(self) -> None:
        self.rows([0.0])

    def _all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(self._world_size)]
        dist.all_gather(parts, tensor.contiguous())
        return parts

    def _tensor(self, value: Any) -> torch.Tensor:
        if isinstance(value, torch.Tensor):
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            return whole.detach().to(self._device, copy=True)
        # A Python number keeps its full precision.
        dtype = torch.float64 if isinstance(value, float) else None
        return torch.as_tensor(value, dtype=dtype, device=self._device).clone()
