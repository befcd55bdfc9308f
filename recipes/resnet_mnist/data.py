"""MNIST as uint8 tensors in host memory, served a whole batch at a time; pixels become floats on the device."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from keepstep.data.fetch import FileSet, locate
from keepstep.errors import DataError

FILES = FileSet(
    {
        "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
        "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
        "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
    },
    urls=("https://ossci-datasets.s3.amazonaws.com/mnist",),
)

Batch = tuple[Tensor, Tensor]


class Mnist(Dataset[Batch]):
    """Images uint8 [n, 1, 28, 28] and labels int64 [n]."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        if len(images) != len(labels):
            raise DataError(
                f"MNIST has {len(images)} images but {len(labels)} labels: the files do not belong together"
            )
        self.images = images[:, None]
        self.labels = labels.long()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, indices: list[int]) -> Batch:
        rows = torch.as_tensor(indices)
        return self.images[rows], self.labels[rows]

    def __getitem__(self, index: int) -> Batch:
        return self.images[index], self.labels[index]


def keep_batch(batch: Any) -> Any:
    """The collate function of a dataset whose `__getitems__` already returns a batch."""
    return batch


def load(data: str | None = None, limit: int | None = None) -> tuple[Mnist, Mnist]:
    """The training and the test set, or the first `limit` samples of each."""
    folder = locate("mnist", FILES, data=data).folder
    train_images, train_labels, test_images, test_labels = (read_idx(folder / file)[:limit] for file in FILES.files)
    return Mnist(train_images, train_labels), Mnist(test_images, test_labels)


def normalise(images: Tensor) -> Tensor:
    """To [-1, 1]: mean 0.5 and deviation 0.5 of pixels in [0, 1]."""
    return images.float() / 127.5 - 1


def read_idx(path: Path) -> Tensor:
    """Reads MNIST's own format: two zero bytes, the type (8: uint8), the rank, each dimension, the values."""
    try:
        content = bytearray(gzip.decompress(path.read_bytes()))
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} is not a whole gzip file: {error}") from error
    rank = content[3] if content[:3] == b"\0\0\x08" and len(content) > 3 else 0
    offset = 4 + 4 * rank
    shape = [int.from_bytes(content[i : i + 4], "big") for i in range(4, offset, 4)]
    if rank == 0 or len(content) - offset != math.prod(shape):
        raise DataError(f"{path} is not an idx file of bytes, or is cut short ({len(content)} bytes, shape {shape})")
    return torch.frombuffer(content, dtype=torch.uint8, offset=offset).view(shape)
