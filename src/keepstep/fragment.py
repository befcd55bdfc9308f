"""One worker's interval of a tensor that lies as a row of numbers: what ZeRO leaves a worker of a parameter."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""A rectangular part of a tensor: its offsets and its sizes."""


class Fragment:
    """Some consecutive numbers of a tensor, by the protocol that lets DCP save and load parts of tensors.

    DCP knows rectangular parts only. An interval is a few of them: what is left of its first row, the whole rows,
    and the beginning of its last one; and the same again within a row that is a tensor itself.
    """

    def __init__(self, shape: torch.Size, begin: int, values: torch.Tensor) -> None:
        """`values`: the numbers from `begin` on, in memory that is the optimizer's or the model's own."""
        self.shape, self.dtype = shape, values.dtype
        self._views: dict[torch.Size, torch.Tensor] = {}
        at = 0
        for offsets, sizes in boxes(tuple(shape), begin, begin + values.numel()):
            length = math.prod(sizes)
            self._views[torch.Size(offsets)] = values.narrow(0, at, length).view(sizes)
            at += length

    def size(self) -> torch.Size:
        return self.shape

    def detach(self) -> Fragment:
        return self

    def copy_(self, other: Fragment) -> None:
        for offsets, view in self._views.items():
            view.copy_(other._views[offsets])

    def parts(self) -> Iterator[torch.Tensor]:
        """The rectangular parts that make it up."""
        return iter(self._views.values())

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(name, offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(ChunkStorageMetadata(offsets, view.shape), properties, self.shape),
            )
            for offsets, view in self._views.items()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets, view.shape) for offsets, view in self._views.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None
        return self._views[index.offset]


def boxes(shape: tuple[int, ...], begin: int, end: int) -> Iterator[Box]:
    """The rectangular parts, in order, that make up the numbers [begin, end) of a tensor."""
    if begin >= end:
        return
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:])
    first, last = -(-begin // row), end // row  # whole rows
    if begin % row:
        yield from _in_row(shape, begin // row, begin, min(end, first * row))
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    if end % row and last >= first:
        yield from _in_row(shape, last, max(begin, last * row), end)


def _in_row(shape: tuple[int, ...], number: int, begin: int, end: int) -> Iterator[Box]:
    start = number * math.prod(shape[1:])
    for offsets, sizes in boxes(shape[1:], begin - start, end - start):
        yield (number, *offsets), (1, *sizes)
