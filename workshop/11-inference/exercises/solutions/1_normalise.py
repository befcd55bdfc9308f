"""reshape keeps the order of the numbers; permute moves the colours."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2470, 0.2435, 0.2616)


def prepare(photos: np.ndarray) -> Tensor:
    images = torch.from_numpy(photos).permute(0, 3, 1, 2).float() / 255
    mean, std = (torch.tensor(values)[:, None, None] for values in (MEAN, STD))
    return (images - mean) / std
