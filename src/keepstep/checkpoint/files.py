"""Writes tensors as a safetensors file, checksummed on the way, with the interpreter left free for training."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
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


def dtype_name(dtype: torch.dtype) -> str:
    """safetensors' word for a tensor's type."""
    if dtype not in _NAMES:
        raise CheckpointError(f"a checkpoint cannot hold a tensor of type {dtype}; known: {', '.join(DTYPES)}")
    return _NAMES[dtype]


def write_safetensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: dict[str, str]) -> FileRecord:
    """Writes contiguous host tensors.

    The safetensors package copies every tensor with the interpreter's lock held, which would stall training while a
    checkpoint is written beside it; writing the same format from the tensors' own memory does not.
    """
    header: dict[str, object] = {"__metadata__": metadata}
    offset = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": dtype_name(tensor.dtype),
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format wants the data aligned
    hasher = xxhash.xxh3_128()
    with path.open("wb", buffering=0) as file:
        for part in (memoryview(struct.pack("<Q", len(text))), memoryview(text), *map(_memory, tensors.values())):
            for start in range(0, len(part), _CHUNK):
                chunk = part[start : start + _CHUNK]
                hasher.update(chunk)
                while chunk:  # a raw file may take less than it is given
                    chunk = chunk[file.write(chunk) :]
        os.fsync(file.fileno())
    return FileRecord(8 + len(text) + offset, hasher.hexdigest())


def _memory(tensor: torch.Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data
