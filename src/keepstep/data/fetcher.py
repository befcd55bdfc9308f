"""Reads the samples of one batch, each under a seed of its own, in the main process or in a DataLoader's worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset, TensorDataset, default_collate

from keepstep.data.generators import Watch
from keepstep.data.plan import Indices
from keepstep.errors import DataError
from keepstep.seeding import Words, mix, mix_array, preserved_cpu_rng, seed_sample


class Request(NamedTuple):
    """What a DataLoader's worker is asked for: travels there as the 'index'."""

    indices: Indices
    key: int
    """Of the pass: a sample's seed depends on it and on the sample's index, on nothing else."""

    def sample_keys(self) -> Words:
        """Each sample's seed."""
        return mix_array(self.key, self.indices.astype(np.uint64))

    def batch_key(self) -> int:
        """The seed of what is drawn for the batch as a whole: of its samples, in their order, and the pass."""
        return xxhash.xxh3_64_intdigest(self.indices.tobytes(), seed=self.key)


_request: Request | None = None
"""The batch that is being fetched in this process."""


def sample_uniforms(count: int) -> torch.Tensor:
    """`count` random numbers in [0, 1) for each sample being fetched, as a float32 tensor [samples, count].

    For data sets that fetch a whole batch at once in `__getitems__`: row i depends on the seed, the pass and
    sample i alone, so augmentation does not depend on the worker, the batch or the world size.
    """
    if _request is None:
        raise DataError("sample_uniforms() works inside a data set's __getitems__ while keepstep fetches a batch only")
    keys = _request.sample_keys()
    columns = [mix_array(column + 1, keys) >> np.uint64(40) for column in range(count)]
    words = np.stack(columns, axis=1) if columns else np.empty((len(keys), 0), np.uint64)
    return torch.from_numpy((words.astype(np.float64) / float(1 << 24)).astype(np.float32))


class Fetcher(Dataset[Any]):
    """Stands in for the user's data set in the DataLoader: `fetcher[request]` is a collated batch."""

    def __init__(self, dataset: Any, collate: Callable[[Any], Any]) -> None:
        self._dataset, self._collate = dataset, collate
        self._reads_batches = _reads_batches(dataset)
        self._never_draws, self._collate_never_draws = _never_draws(dataset), collate is default_collate
        self._draws = self._collate_draws = False
        self._watch = Watch()
        # One gather a tensor gives what collating its single samples would, twenty times as fast.
        plain = type(dataset) is TensorDataset and collate is default_collate
        self._tensors = dataset.tensors if plain else None

    def __getitem__(self, request: Request) -> Any:
        global _request
        if self._tensors is not None:
            chosen = torch.from_numpy(request.indices)
            return [tensor[chosen] for tensor in self._tensors]
        _request = request
        try:
            return self._batch(request)
        finally:
            _request = None

    def _batch(self, request: Request) -> Any:
        samples = self._samples(request)
        if self._collate_never_draws:
            return self._collate(samples)
        if not self._collate_draws:
            batch, self._collate_draws = self._tried(lambda: self._collate(samples))
            if not self._collate_draws:
                return batch
            samples = self._samples(request)  # anew: it may have changed those in place
        with preserved_cpu_rng():
            seed_sample(request.batch_key())
            return self._collate(samples)

    def _samples(self, request: Request) -> Any:
        indices = request.indices.tolist()
        if self._never_draws:
            return self._read(indices)
        if not self._draws:
            samples, self._draws = self._tried(lambda: self._read(indices))
            if not self._draws:
                return samples
        with preserved_cpu_rng():
            return self._read(indices, request.sample_keys())

    def _tried(self, work: Callable[[], Any]) -> tuple[Any, bool]:
        """What comes of `work` unseeded, and whether it drew random numbers: if so, it is to be done again, seeded.

        Seeding three generators for each sample costs more than many a data set's own work. So try without: if no
        generator moved, nothing is random and nothing was lost.
        """
        self._watch.begin()
        result = work()
        moved = self._watch.moved()
        if moved:
            self._watch.restore()
        return result, moved

    def _read(self, indices: list[int], keys: Words | None = None) -> Any:
        if self._reads_batches:
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


def _reads_batches(dataset: Any) -> bool:
    """Whether a data set reads a whole batch by its own doing: some of torch's only hand it to those they wrap."""
    method = getattr(type(dataset), "__getitems__", None)
    if method is Subset.__getitems__:
        return _reads_batches(dataset.dataset)
    if method is StackDataset.__getitems__:
        parts = dataset.datasets
        return any(_reads_batches(part) for part in (parts.values() if isinstance(parts, dict) else parts))
    return callable(getattr(dataset, "__getitems__", None))


def _never_draws(dataset: object) -> bool:
    if type(dataset) is Subset:
        return _never_draws(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return all(_never_draws(part) for part in dataset.datasets)
    return type(dataset) is TensorDataset
