"""Exercise 1: give the model what it was trained on.

Write `prepare(photos)`: photos as Pillow and cameras give them, uint8 [n, height, width, 3], become what the model of
CIFAR-10 takes: float32 [n, 3, height, width], each colour with the mean and deviation of the training images, which
were measured on pixels between 0 and 1.

What stands here has the right shape and runs without an error, as most wrong normalisations do.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2470, 0.2435, 0.2616)


def prepare(photos: np.ndarray) -> Tensor:
    n, height, width, _ = photos.shape
    return torch.from_numpy(photos).float().reshape(n, 3, height, width) / 255
