"""Reads the samples of one batch, each under a seed of its own, in the main process or in a DataLoader's worker."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from keepstep.data.plan import Indices
from keepstep.errors import DataError
from keepstep.seeding import Words, mix, mix_array, preserved_cpu_rng, seed_sample


@dataclass(frozen=True)
class Request:
    """What a DataLoader's worker is asked for: travels there as the 'index'."""

    indices: Indices
    key: int
    """Of the pass: a sample's seed depends on it and on the sample's index, on nothing else."""


_batch_keys: Words | None = None
"""Seeds of the samples of the batch that is being fetched in this process."""


def sample_uniforms(count: int) -> torch.Tensor:
    """`count` random numbers in [0, 1) for each sample being fetched, as a float32 tensor [samples, count].

    For data sets that fetch a whole batch at once in `__getitems__`: row i depends on the seed, the pass and
    sample i alone, so augmentation does not depend on the worker, the batch or the world size.
    """
    if _batch_keys is None:
        raise DataError("sample_uniforms() works inside a data set's __getitems__ while keepstep fetches a batch only")
    columns = [mix_array(column + 1, _batch_keys) >> np.uint64(40) for column in range(count)]
    words = np.stack(columns, axis=1) if columns else np.empty((len(_batch_keys), 0), np.uint64)
    return torch.from_numpy((words.astype(np.float64) / float(1 << 24)).astype(np.float32))


class Fetcher(Dataset[Any]):
    """Stands in for the user's data set in the DataLoader: `fetcher[request]` is a collated batch."""

    def __init__(self, dataset: Any, collate: Callable[[Any], Any]) -> None:
        self._dataset, self._collate = dataset, collate
        self._never_draws = _never_draws(dataset)
        self._draws = False

    def __getitem__(self, request: Request) -> Any:
        global _batch_keys
        keys = mix_array(request.key, request.indices.astype(np.uint64))
        _batch_keys = keys
        try:
            return self._collate(self._samples(request.indices.tolist(), keys))
        finally:
            _batch_keys = None

    def _samples(self, indices: list[int], keys: Words) -> Any:
        if self._never_draws:
            return self._read(indices)
        if not self._draws:
            # Seeding three generators for each sample costs more than many a data set's own work. So try without:
            # if no generator moved, the data set is not random and nothing was lost.
            before = _cpu_rng()
            samples = self._read(indices)
            if _same_rng(before, _cpu_rng()):
                return samples
            _restore_cpu_rng(before)
            self._draws = True
        with preserved_cpu_rng():
            return self._read(indices, keys)

    def _read(self, indices: list[int], keys: Words | None = None) -> Any:
        if hasattr(self._dataset, "__getitems__"):
            if keys is not None and len(keys):
                seed_sample(int(keys[0]))
            return self._dataset.__getitems__(indices)
        if keys is None:
            return [self._dataset[index] for index in indices]
        return [self._seeded(index, int(key)) for index, key in zip(indices, keys, strict=True)]

    def _seeded(self, index: int, key: int) -> Any:
        seed_sample(key)
        return self._dataset[index]


def pass_key(seed: int, pass_number: int) -> int:
    """The key that all samples of one pass over a data set share."""
    return mix(seed, 0xDA7A, pass_number)


def _never_draws(dataset: object) -> bool:
    if type(dataset) is Subset:
        return _never_draws(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return all(_never_draws(part) for part in dataset.datasets)
    return type(dataset) is TensorDataset


def _cpu_rng() -> tuple[Any, Any, torch.Tensor]:
    return random.getstate(), np.random.get_state(legacy=True), torch.get_rng_state()


def _same_rng(a: tuple[Any, Any, torch.Tensor], b: tuple[Any, Any, torch.Tensor]) -> bool:
    numpy_a, numpy_b = a[1], b[1]
    return (
        numpy_a[2:] == numpy_b[2:]
        and a[0] == b[0]
        and torch.equal(a[2], b[2])
        and bool(np.array_equal(numpy_a[1], numpy_b[1]))
    )


def _restore_cpu_rng(state: tuple[Any, Any, torch.Tensor]) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(state[2])
