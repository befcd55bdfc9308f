"""A task's images as a Ray data set: read on the cluster's CPUs, in blocks of a known number of rows."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import numpy as np

from common.tasks import TASKS

Columns = dict[str, Any]


def images(task: str, split: str, data: str | None, limit: int | None, rows_per_block: int) -> Any:
    """A ray.data.Dataset of {"id", "image", "label"}. `split`: "train" or "test"."""
    import ray.data

    num_rows = len(_loaded(task, split, data, limit))
    ids = ray.data.range(num_rows, override_num_blocks=-(-num_rows // rows_per_block))
    # Decoding and augmenting belong here, where every CPU of the cluster can take part; normalising is left to the
    # GPU, since a byte a pixel is a quarter of what floats would be to send.
    return ids.map_batches(partial(_read, task, split, data, limit), batch_size=None)


def _read(task: str, split: str, data: str | None, limit: int | None, rows: Columns) -> Columns:
    pixels, labels = _loaded(task, split, data, limit)[rows["id"]]
    return {"id": rows["id"], "image": np.ascontiguousarray(pixels.numpy()), "label": labels.numpy()}


@cache  # once a process, not once a block
def _loaded(task: str, split: str, data: str | None, limit: int | None) -> Any:
    train, test = TASKS[task].datasets(data, limit)
    return train if split == "train" else test
