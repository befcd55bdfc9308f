"""Random flips that come out the same when the data is read again."""

from __future__ import annotations

import numpy as np


def flip(batch: dict[str, np.ndarray], seed: int, epoch: int) -> dict[str, np.ndarray]:
    images = batch["image"].copy()
    for row, sample in enumerate(batch["id"]):
        if np.random.default_rng([seed, epoch, int(sample)]).random() < 0.5:
            images[row] = images[row][..., ::-1]
    return {**batch, "image": images}
