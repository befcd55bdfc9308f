"""Each worker's mean counts by its number of samples."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn


def average_gradients(model: nn.Module, num_samples: int) -> None:
    total = torch.tensor(float(num_samples))
    dist.all_reduce(total)
    for parameter in model.parameters():
        parameter.grad *= num_samples / total.item()
        dist.all_reduce(parameter.grad)
