"""What those who predict at the same time must agree on."""

from __future__ import annotations

from collections import Counter

import pyarrow as pa


class Agreement:
    """The columns that all parts have: those of parts that are there, or else of the first batch that was predicted."""

    def __init__(self, schema: bytes | None) -> None:
        self._schema = schema
        self._begun: Counter[int] = Counter()

    def agree(self, schema: bytes) -> bytes:
        """The columns to write, given those that somebody has."""
        self._schema = self._schema or schema
        return self._schema

    def begin(self, piece: int) -> int:
        """How often a piece has been begun by now: more than once where a worker died over it."""
        self._begun[piece] += 1
        return self._begun[piece]


def pack(schema: pa.Schema) -> bytes:
    packed: bytes = schema.serialize().to_pybytes()
    return packed


def unpack(packed: bytes) -> pa.Schema:
    return pa.ipc.read_schema(pa.py_buffer(packed))
