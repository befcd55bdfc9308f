"""Each worker has the gradient of its own mean loss. Make it that of the mean over all workers' samples.

What stands here is right as long as all workers have as many samples. Make it right for any numbers: with 3 samples on
one worker and 1 on another, a sample must count for as much on either. Check: keepstep workshop 1 --check
"""

from __future__ import annotations

import torch.distributed as dist
from torch import nn


def average_gradients(model: nn.Module, num_samples: int) -> None:
    """Called on every worker after loss.backward(); `num_samples`: in this worker's batch."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
