"""Reads the samples of one batch, each under a seed of its own, in the main process or in a DataLoader's worker."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, default_collate

from keepstep.data.plan import Indices
from keepstep.errors import DataError
from keepstep.seeding import Words, mix, mix_array, preserved_cpu_rng, seed_sample


@dataclass(frozen=True)
class Request:
    """What a DataLoader's worker is asked for: travels there as the 'index'."""

    indices: Indices
    key: int
    """Of the pass: a sample's seed depends on it and on the sample's index, on nothing else."""

    def sample_keys(self) -> Words:
        """Each sample's seed."""
        return mix_array(self.key, self.indices.astype(np.uint64))


_MT19937_BYTES = 4 * 624 + 4
"""624 words and a position."""

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
        self._never_draws = _never_draws(dataset)
        self._draws = False
        self._rng: _Rng | None = None
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
            return self._collate(self._samples(request))
        finally:
            _request = None

    def _samples(self, request: Request) -> Any:
        indices = request.indices.tolist()
        if self._never_draws:
            return self._read(indices)
        if not self._draws:
            # Seeding three generators for each sample costs more than many a data set's own work. So try without:
            # if no generator moved, the data set is not random and nothing was lost.
            self._rng = _cpu_rng(self._rng)
            samples = self._read(indices)
            if not self._rng.moved():
                return samples
            self._rng.restore()
            self._draws = True
        with preserved_cpu_rng():
            return self._read(indices, request.sample_keys())

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


class _Rng(NamedTuple):
    """The states of the CPU generators."""

    python: Any
    numpy: Any
    torch: bytes
    numpy_memory: bytes | None

    def moved(self) -> bool:
        """Whether any generator was drawn from since."""
        if self.numpy_memory is None or self.numpy[3]:  # a cached normal number can be drawn with nothing else moving
            now: Any = np.random.get_state(legacy=True)
            numpy_moved = now[2:] != self.numpy[2:] or not np.array_equal(now[1], self.numpy[1])
        else:
            numpy_moved = _numpy_memory() != self.numpy_memory
        return numpy_moved or _torch_rng() != self.torch or random.getstate() != self.python

    def restore(self) -> None:
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(torch.frombuffer(bytearray(self.torch), dtype=torch.uint8))


def _cpu_rng(last: _Rng | None) -> _Rng:
    """The states now. `last`: of the batch before; where NumPy's has not moved since, it is still good."""
    memory = _numpy_memory()
    if last is not None and memory is not None and memory == last.numpy_memory and not last.numpy[3]:
        numpy_state = last.numpy
    else:
        numpy_state = np.random.get_state(legacy=True)
    return _Rng(random.getstate(), numpy_state, _torch_rng(), memory)


def _torch_rng() -> bytes:
    return torch.get_rng_state().numpy().tobytes()


def _numpy_memory() -> bytes | None:
    """The memory of NumPy's global generator, whose `get_state` takes 70 us; None where it is not the usual one."""
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if type(generator) is not np.random.MT19937:
        return None
    return ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)
