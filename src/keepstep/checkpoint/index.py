"""A checkpoint's index (tensors.json): which piece of which tensor lies where. It is believed only once it adds up."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from keepstep.checkpoint.files import DTYPES
from keepstep.checkpoint.untrusted import file_name, integer, shown
from keepstep.errors import CheckpointError

_MOST_DIMENSIONS = 64
_MOST_BYTES = 1 << 62


@dataclass(frozen=True)
class Piece:
    """A box of a tensor, and where its values lie."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    name: str


@dataclass(frozen=True)
class Entry:
    """A tensor; its pieces hold every element exactly once."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: list[Piece]


Index = dict[str, Entry]


def parse_index(raw: Any) -> Index:
    """The index, or an error that says what is wrong with it."""
    if not isinstance(raw, dict):
        raise CheckpointError(f"it is {shown(raw)}; an object was expected")
    index = {}
    for key, entry in raw.items():
        try:
            index[key] = _entry(entry)
        except CheckpointError as error:
            raise CheckpointError(f"tensor {shown(key)}: {error}") from None
        except (KeyError, TypeError) as error:
            raise CheckpointError(f"tensor {shown(key)} is malformed: {shown(error)}") from None
    return index


def bytes_by_file(index: Index) -> Mapping[str, int]:
    """How many bytes of tensors the index says that each file holds."""
    held: Counter[str] = Counter()
    for entry in index.values():
        for piece in entry.pieces:
            held[piece.file] += math.prod(piece.sizes) * entry.dtype.itemsize
    return held


def _entry(raw: dict[str, Any]) -> Entry:
    if raw["dtype"] not in DTYPES:
        raise CheckpointError(f"its type is {shown(raw['dtype'])}; known: {', '.join(DTYPES)}")
    dtype, shape = DTYPES[raw["dtype"]], _numbers(raw["shape"])
    if math.prod(shape) * dtype.itemsize > _MOST_BYTES:
        raise CheckpointError(f"its shape {shown(shape)} is of no tensor")
    if not isinstance(raw["chunks"], list):
        raise CheckpointError("its chunks are no list")
    # Pieces without an element have nothing to read, and may stand where another begins.
    pieces = [piece for chunk in raw["chunks"] if math.prod((piece := _piece(chunk, shape)).sizes)]
    held = sum(math.prod(piece.sizes) for piece in pieces)
    if held != math.prod(shape):
        # Elements that no piece holds would be whatever was in memory.
        raise CheckpointError(f"its pieces have {held} elements; its shape {list(shape)} has {math.prod(shape)}")
    if _overlap(pieces):
        raise CheckpointError("its pieces overlap")
    return Entry(dtype, shape, pieces)


def _piece(raw: dict[str, Any], shape: tuple[int, ...]) -> Piece:
    piece = Piece(_numbers(raw["offsets"]), _numbers(raw["sizes"]), file_name(raw["file"]), raw["name"])
    if not isinstance(piece.name, str):
        raise CheckpointError(f"a piece's name is {shown(piece.name)}; a text was expected")
    fits = len(piece.offsets) == len(piece.sizes) == len(shape) and all(
        offset + size <= length for offset, size, length in zip(piece.offsets, piece.sizes, shape, strict=True)
    )
    if not fits:
        place = f"at {list(piece.offsets)} of size {list(piece.sizes)}"
        raise CheckpointError(f"a piece {place} does not lie in the shape {list(shape)}")
    return piece


def _numbers(raw: Any) -> tuple[int, ...]:
    if not isinstance(raw, list) or len(raw) > _MOST_DIMENSIONS:
        raise CheckpointError(f"{shown(raw)} is no list of at most {_MOST_DIMENSIONS} numbers")
    return tuple(integer(number, "a size or offset") for number in raw)


def _overlap(pieces: list[Piece]) -> bool:
    """Whether any element is in two pieces."""
    if len(pieces) < 2 or not pieces[0].sizes:
        return False
    begins: npt.NDArray[np.int64] = np.array([piece.offsets for piece in pieces], dtype=np.int64)
    ends = begins + np.array([piece.sizes for piece in pieces], dtype=np.int64)
    # Along the dimension that is cut most often: pieces that follow each other there need no further look.
    dimension = max(range(begins.shape[1]), key=lambda d: len(np.unique(begins[:, d])))
    order = np.argsort(begins[:, dimension], kind="stable")
    begins, ends = begins[order], ends[order]
    if (ends[:-1, dimension] <= begins[1:, dimension]).all():
        return False
    reach = np.searchsorted(begins[:, dimension], ends[:, dimension])
    for number, stop in enumerate(reach):
        later = slice(number + 1, int(stop))
        if ((begins[later] < ends[number]) & (ends[later] > begins[number])).all(axis=1).any():
            return True
    return False
