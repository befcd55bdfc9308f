"""A Ray data set as a loader: the same rows in the same batches, whatever the workers, each exactly once an epoch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from keepstep.data.ray_cluster import import_ray
from keepstep.data.ray_windows import Cut
from keepstep.errors import DataError

if TYPE_CHECKING:
    from ray.data import Dataset

_WINDOW_BATCHES = 32
"""Batches in a window, where the user does not say: rows are shuffled among as many."""


class RayData:
    """`run.prepare(keepstep.RayData(ds, batch_size=256, shuffle=True))`: what a DataLoader is to a torch data set."""

    def __init__(
        self,
        dataset: Dataset | Callable[[], Dataset],
        batch_size: int,
        *,
        shuffle: bool = False,
        drop_last: bool = False,
        collate_fn: Callable[[dict[str, Any]], Any] | None = None,
        window_rows: int | None = None,
    ) -> None:
        """`dataset`: a ray.data.Dataset, or a function without arguments that makes one, which rank 0 alone calls.
        `batch_size`: of all workers together.
        `shuffle`: the input blocks are read in another order each epoch, and rows are shuffled within a window.
        `collate_fn`: makes a batch of a dict of NumPy arrays; without it, a batch is a dict of tensors.
        `window_rows`: rows in a window, 32 batches by default: more shuffle better, and need more memory.
        """
        if not isinstance(batch_size, int) or batch_size < 1:
            raise DataError(f"batch_size is {batch_size!r}; give a whole number of rows for all workers, 1 or more")
        if window_rows is not None and window_rows < batch_size:
            raise DataError(f"window_rows is {window_rows}; at least one batch ({batch_size}) is needed")
        _check_is_dataset(dataset)
        self.dataset, self.batch_size = dataset, batch_size
        self.shuffle, self.drop_last, self.collate_fn = shuffle, drop_last, collate_fn
        # Whole batches, so that none lies in two windows.
        self.window_rows = (window_rows // batch_size if window_rows else _WINDOW_BATCHES) * batch_size

    def cut(self, seed: int) -> Cut:
        return Cut(self.batch_size, self.window_rows, self.shuffle, seed)

    def made(self) -> Any:
        """The data set, made if a function was given."""
        if not callable(self.dataset):
            return self.dataset
        dataset = self.dataset()
        _check_is_dataset(dataset)
        return dataset


def _check_is_dataset(dataset: Any) -> None:
    ray = import_ray()
    if isinstance(dataset, ray.data.Dataset) or (callable(dataset) and not isinstance(dataset, type)):
        return
    raise DataError(
        f"keepstep.RayData got a {type(dataset).__name__}; give it a ray.data.Dataset (as ray.data.read_parquet "
        "returns), or a function that makes one"
    )
