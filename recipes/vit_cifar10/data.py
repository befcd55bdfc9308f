"""CIFAR-10 as uint8 tensors in host memory, served a whole batch at a time; pixels become floats on the device."""

from __future__ import annotations

import hashlib
import io
import tarfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

import keepstep
from keepstep.data.fetch import FileSet, cache_folder, locate, locked_cache, whole_file
from keepstep.errors import DataError

PARQUET = {
    "train": [f"train-{k:05}-of-00005.parquet" for k in range(5)],
    "test": ["test-00000-of-00001.parquet"],
}
BINARY = {
    "train": [f"cifar-10-batches-bin/data_batch_{k}.bin" for k in range(1, 6)],
    "test": ["cifar-10-batches-bin/test_batch.bin"],
}
PARQUET_FILES = FileSet(dict.fromkeys(PARQUET["train"] + PARQUET["test"]))
BINARY_FILES = FileSet(
    {"cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530"}, urls=("https://www.cs.toronto.edu/~kriz",)
)

PADDING = 4
MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2470, 0.2435, 0.2616)

Batch = tuple[Tensor, Tensor, Tensor]
Records = npt.NDArray[np.uint8]
"""[n, 1 + 3 * 32 * 32], a label and then an image's planes: the layout of CIFAR-10's binary version."""
RECORD_BYTES = 1 + 3 * 32 * 32


class Cifar10(Dataset[Batch]):
    """Images uint8 [n, 3, 32, 32], labels int64 [n], and three uniforms a sample for `augment`."""

    def __init__(self, records: Records) -> None:
        self.labels = torch.from_numpy(records[:, 0].astype(np.int64))
        self.images = torch.from_numpy(records)[:, 1:].view(-1, 3, 32, 32)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, indices: list[int]) -> Batch:
        rows = torch.as_tensor(indices)
        # Drawn by keepstep from the seed, the epoch and the sample's index: the same whichever worker asks.
        return self.images[rows], self.labels[rows], keepstep.sample_uniforms(3)

    def __getitem__(self, index: int) -> Batch:
        images, labels, randoms = self.__getitems__([index])
        return images[0], labels[0], randoms[0]


def keep_batch(batch: Any) -> Any:
    """The collate function of a dataset whose `__getitems__` already returns a batch."""
    return batch


def load(data: str | None = None, limit: int | None = None) -> tuple[Cifar10, Cifar10]:
    """The training and the test set, or the first `limit` samples of each."""
    folder, form = locate("cifar10", PARQUET_FILES, BINARY_FILES, data=data)
    sources = [folder / file for file in form.files]
    parquet = form is PARQUET_FILES
    train, test = (_cached_records(split, sources, parquet) for split in ("train", "test"))
    return Cifar10(train[:limit]), Cifar10(test[:limit])


def augment(images: Tensor, randoms: Tensor) -> Tensor:
    """Crops each image at random from itself padded by 4, and flips every other one: `randoms` [n, 3] decides."""
    n, channels, height, width = images.shape
    device = images.device
    top, left = (randoms[:, :2] * (2 * PADDING + 1)).long().unbind(1)
    rows = top[:, None] + torch.arange(height, device=device)
    columns = torch.arange(width, device=device).expand(n, width)
    columns = left[:, None] + torch.where(randoms[:, 2:] < 0.5, columns.flip(1), columns)
    sample = torch.arange(n, device=device)[:, None, None, None]
    channel = torch.arange(channels, device=device)[:, None, None]
    return F.pad(images, [PADDING] * 4)[sample, channel, rows[:, None, :, None], columns[:, None, None, :]]


def normalise(images: Tensor) -> Tensor:
    mean, std = _statistics(images.device)
    return (images.float() - mean) / std


@cache  # a tensor made anew at each step would be a copy to the device at each step
def _statistics(device: torch.device) -> tuple[Tensor, Tensor]:
    mean, std = (255 * torch.tensor(values, device=device).view(3, 1, 1) for values in (MEAN, STD))
    return mean, std


def _cached_records(split: str, sources: list[Path], parquet: bool) -> Records:
    """The decoded split from the cache: decoded once by one process, then mapped by all, which share its memory."""
    path = cache_folder("cifar10") / f"{split}-{_fingerprint(sources)}.npy"
    if not path.exists():
        with locked_cache("cifar10"):
            if not path.exists():
                records = _decode_parquet(split, sources) if parquet else _decode_binary(split, sources[0])
                with whole_file(path) as file:
                    np.save(file, records)
    # "c": copy on write. Nobody writes, but torch warns about arrays that cannot be written.
    mapped: Records = np.load(path, mmap_mode="c")
    return mapped


def _fingerprint(sources: list[Path]) -> str:
    stats = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in sources]
    return hashlib.sha256(repr(stats).encode()).hexdigest()[:16]


def _decode_parquet(split: str, sources: list[Path]) -> Records:
    return np.stack([record for path in sources if path.name in PARQUET[split] for record in _parquet_records(path)])


def _parquet_records(path: Path) -> list[Records]:
    try:
        import pyarrow.parquet as pq  # type: ignore[import-untyped]
        from PIL import Image
    except ImportError as error:
        raise DataError(f"{path} is read with pyarrow and pillow: pip install pyarrow pillow") from error

    def planes(png: bytes) -> Records:
        return np.asarray(Image.open(io.BytesIO(png)).convert("RGB")).transpose(2, 0, 1).reshape(RECORD_BYTES - 1)

    try:
        rows = pq.ParquetFile(path).read(columns=["image", "label"]).to_pylist()
        return [np.append(np.uint8(row["label"]), planes(row["image"]["bytes"])) for row in rows]
    except (KeyError, ValueError, OSError) as error:
        raise DataError(f"{path} does not hold 32x32 CIFAR-10 images and labels, or is damaged: {error}") from error


def _decode_binary(split: str, archive: Path) -> Records:
    try:
        with tarfile.open(archive) as tar:
            members = [tar.extractfile(name) for name in BINARY[split]]
            content = b"".join(member.read() for member in members if member)
        return np.frombuffer(content, np.uint8).reshape(-1, RECORD_BYTES)
    except (KeyError, ValueError, EOFError, OSError, tarfile.TarError) as error:
        raise DataError(f"{archive} is not CIFAR-10's binary version, or is damaged: {error}") from error
