"""A task's images as a Ray data set: read on the cluster's CPUs, in blocks of a known number of rows."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import TensorDataset

from common.tasks import TASKS


def images(task: str, split: str, data: str | None, limit: int | None, rows_per_block: int) -> Any:
    """A ray.data.Dataset of {"id", "image", "label"}. `split`: "train" or "test"."""
    import ray.data

    workshop = str(Path(__file__).parents[1])

    def read(rows: dict[str, Any]) -> dict[str, Any]:
        if workshop not in sys.path:  # a Ray worker does not know where the lessons' shared code is
            sys.path.append(workshop)
        from common.ray_images import loaded

        pixels, labels = loaded(task, split, data, limit)[rows["id"].tolist()]
        return {"id": rows["id"], "image": np.ascontiguousarray(pixels.numpy()), "label": labels.numpy()}

    ray.data.DataContext.get_current().enable_progress_bars = False
    num_rows = len(loaded(task, split, data, limit))
    ids = ray.data.range(num_rows, override_num_blocks=-(-num_rows // rows_per_block))
    # Decoding and augmenting belong here, where every CPU of the cluster can take part; normalising is left to the
    # device, since a byte a pixel is a quarter of what floats would be to send.
    return ids.map_batches(read, batch_size=None)


@cache  # once a process, not once a block
def loaded(task: str, split: str, data: str | None, limit: int | None) -> TensorDataset:
    train, test = TASKS[task].datasets(data, limit)
    return train if split == "train" else test
