"""Writes tensors as a safetensors file, checksummed on the way, with the interpreter left free for training."""

from __future__ import annotations

import itertools
import json
import os
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
import xxhash

from keepstep.checkpoint.store import FileRecord
from keepstep.errors import CheckpointError

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.bool: "BOOL",
}
DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_CHUNK = 1 << 24
_METADATA = "__metadata__"
"""What the format calls its free text, beside the tensors' names."""


def dtype_name(dtype: torch.dtype) -> str:
    """safetensors' word for a tensor's type."""
    if dtype not in _NAMES:
        raise CheckpointError(f"a checkpoint cannot hold a tensor of type {dtype}; known: {', '.join(DTYPES)}")
    return _NAMES[dtype]


Layout = Mapping[str, tuple[torch.dtype, torch.Size]]
"""Name → type and shape of each tensor of a file, in the file's order."""


def nbytes(dtype: torch.dtype, shape: torch.Size) -> int:
    return shape.numel() * dtype.itemsize


def write_safetensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: dict[str, str]) -> FileRecord:
    """Writes contiguous host tensors.

    The safetensors package copies every tensor with the interpreter's lock held, which would stall training while a
    checkpoint is written beside it; writing the same format from the tensors' own memory does not.
    """
    layout = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    return stream_safetensors(path, layout, tensors.values(), metadata)


def stream_safetensors(
    path: Path, layout: Layout, tensors: Iterable[torch.Tensor], metadata: dict[str, str]
) -> FileRecord:
    """Writes tensors that come one at a time, in the layout's order: the format has their places at its beginning."""
    header = _header(layout, metadata)
    hasher = xxhash.xxh3_128()
    written = 0
    with path.open("wb", buffering=0) as file:
        for part in itertools.chain([memoryview(header)], map(_memory, tensors)):
            for start in range(0, len(part), _CHUNK):
                chunk = part[start : start + _CHUNK]
                hasher.update(chunk)
                while chunk:  # a raw file may take less than it is given
                    chunk = chunk[file.write(chunk) :]
            written += len(part)
        os.fsync(file.fileno())
    assert written == len(header) + sum(itertools.starmap(nbytes, layout.values())), "tensors that were not announced"
    return FileRecord(written, hasher.hexdigest())


def _header(layout: Layout, metadata: dict[str, str]) -> bytes:
    header: dict[str, object] = {_METADATA: metadata}
    offset = 0
    for name, (dtype, shape) in layout.items():
        if name == _METADATA:
            raise CheckpointError(f"a safetensors file cannot hold a tensor of the name {_METADATA}; name it otherwise")
        end = offset + nbytes(dtype, shape)
        header[name] = {"dtype": dtype_name(dtype), "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format wants the data aligned
    return struct.pack("<Q", len(text)) + text


def _memory(tensor: torch.Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data
