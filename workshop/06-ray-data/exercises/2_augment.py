"""Random flips that come out the same when the data is read again.

After a crash the blocks of an epoch are read and transformed again: a row must get the same flip, whichever batch it
is in, and another one in another epoch. `batch` has "id" and "image", uint8 [n, 1, 28, 28]; flip about half of the
images left to right. What stands here draws by the row's place in its batch.
"""

from __future__ import annotations

import numpy as np


def flip(batch: dict[str, np.ndarray], seed: int, epoch: int) -> dict[str, np.ndarray]:
    images = batch["image"].copy()
    flipped = np.random.default_rng([seed, epoch]).random(len(images)) < 0.5
    images[flipped] = images[flipped][..., ::-1]
    return {**batch, "image": images}
