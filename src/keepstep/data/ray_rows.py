"""Takes rows out of Arrow blocks into tensors: one copy from Ray's shared memory, pinned where it goes to a GPU."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from keepstep.data.plan import Indices
from keepstep.data.ray_windows import Piece
from keepstep.errors import DataError

Array = npt.NDArray[Any]
Kinds = dict[str, str]


def _references(arrays: list[Array], number: int) -> int:
    return sys.getrefcount(arrays[number])


class Buffers:
    """Memory for batches, taken again once nobody has the batch that was in it: new pages cost more than the copy."""

    _MOST = 8
    """Of a column: those that are made ahead, the one in use, and some that a loop may keep."""
    _FREE = _references([np.empty(0)], 0)
    """To an array that only its list has; a tensor over its memory is one more."""

    def __init__(self, pin: bool) -> None:
        self._pin = pin
        self._made: dict[str, list[Array]] = {}

    def empty(self, column: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array | torch.Tensor:
        try:
            kind = torch.from_numpy(np.empty(0, dtype)).dtype
        except TypeError:  # strings, dates, objects
            return np.empty(shape, dtype)
        if self._pin:  # of which torch itself keeps what was used
            return torch.empty(shape, dtype=kind, pin_memory=True)
        made = self._made.setdefault(column, [])
        for number in reversed(range(len(made))):
            if _references(made, number) == self._FREE:
                if made[number].shape == shape and made[number].dtype == dtype:
                    return torch.from_numpy(made[number])
                del made[number]  # of an uneven batch
        array: Array = np.empty(shape, dtype)
        if len(made) < self._MOST:
            made.append(array)
        return torch.from_numpy(array)


class Rows:
    """The rows of a window, by their position in it."""

    def __init__(self, pieces: Sequence[Piece], blocks: Sequence[Any], buffers: Buffers) -> None:
        """`blocks`: those of the pieces, fetched."""
        self._buffers = buffers
        self._tables = [_table(block, piece) for piece, block in zip(pieces, blocks, strict=True)]
        self._ends = np.cumsum([len(table) for table in self._tables])
        self.kinds = _kinds(self._tables)
        """What each column holds."""
        self._columns = {name: [_column(table, name) for table in self._tables] for name in self.kinds}

    def take(self, rows: Indices) -> dict[str, Array | torch.Tensor]:
        """The rows in this order, by column: a tensor, or the NumPy array of what no tensor can hold."""
        parts = self._parts(rows)
        return {name: self._gather(name, parts, len(rows)) for name in self.kinds}

    def mark(self) -> str:
        """Tells, but for chance, these rows from others: a digest of the first one."""
        digest = xxhash.xxh3_64()
        for name, values in self.take(np.zeros(1, np.int64)).items():
            array = values.numpy() if isinstance(values, torch.Tensor) else values
            digest.update(name.encode())
            digest.update(repr(array.tolist()).encode() if array.dtype.hasobject else array.tobytes())
        return digest.hexdigest()

    def _parts(self, rows: Indices) -> list[tuple[int, Any, Any]]:
        """(block, positions among the rows, rows of the block), for each block that has some of them."""
        if len(self._tables) == 1:
            return [(0, slice(None), _as_slice(rows))]
        block_of = np.searchsorted(self._ends, rows, side="right")
        by_block = np.argsort(block_of, kind="stable")
        used, begins = np.unique(block_of[by_block], return_index=True)
        groups = np.split(by_block, begins[1:])
        first_rows = self._ends[used] - np.array([len(self._tables[block]) for block in used])
        return [
            (int(block), _as_slice(group), _as_slice(rows[group] - first_row))
            for block, group, first_row in zip(used, groups, first_rows, strict=True)
        ]

    def _gather(self, name: str, parts: list[tuple[int, Any, Any]], count: int) -> Array | torch.Tensor:
        found = [(positions, _values(self._columns[name][block], rows)) for block, positions, rows in parts]
        kinds = {(values.dtype, values.shape[1:]) for _, values in found}
        if len(kinds) == 1:
            dtype, shape = kinds.pop()
            whole = self._buffers.empty(name, (count, *shape), dtype)
        else:
            whole = np.empty(count, dtype=object)  # samples of different shapes
            found = [(positions, _each_an_object(values)) for positions, values in found]
        target = whole.numpy() if isinstance(whole, torch.Tensor) else whole
        for positions, values in found:
            target[positions] = values
        return whole


def _table(block: Any, piece: Piece) -> Any:
    from ray.data.block import BlockAccessor

    return BlockAccessor.for_block(block).to_arrow().slice(piece.begin, piece.end - piece.begin)


def check_alike(first: Kinds, second: Kinds) -> None:
    """Raises where a batch of the one would not look like a batch of the other."""
    if first.keys() != second.keys():
        raise DataError(
            f"rows with differing columns: {sorted(first)} in one block, {sorted(second)} in another; let the last map "
            "or map_batches return the same columns for every row"
        )
    for name, kind in first.items():
        if second[name] != kind:
            here, there = sorted([kind, second[name]])
            raise DataError(
                f"the column '{name}' is {here} in one block and {there} in another; give it one type with "
                "map_batches, and fill its nulls"
            )


def _kinds(tables: Sequence[Any]) -> Kinds:
    all_kinds = [{field.name: _kind(table, field) for field in table.schema} for table in tables]
    for kinds in all_kinds[1:]:
        check_alike(all_kinds[0], kinds)
    return all_kinds[0]


def _kind(table: Any, field: Any) -> str:
    """A column's type, but for the shape of tensors, which may differ."""
    import pyarrow as pa

    if isinstance(field.type, pa.ExtensionType):
        return "tensor"
    # NumPy has no integer that is missing: a null makes floating-point numbers of the whole column.
    nulls = pa.types.is_integer(field.type) and table.column(field.name).null_count
    return f"{field.type} with nulls" if nulls else str(field.type)


def _column(table: Any, name: str) -> Any:
    """A NumPy array where that takes no copy, or little; else the Arrow column, from which rows are taken first."""
    import pyarrow as pa
    from ray.data.block import BlockAccessor

    kind = table.schema.field(name).type
    fixed = pa.types.is_primitive(kind) or (isinstance(kind, pa.ExtensionType) and hasattr(kind, "shape"))
    if fixed and not table.column(name).null_count:
        return BlockAccessor.for_block(table.select([name])).to_numpy(name)
    return table.select([name])


def _values(column: Any, rows: Any) -> Array:
    from ray.data.block import BlockAccessor

    values: Array
    if isinstance(column, np.ndarray):
        values = column[rows]
        return values
    taken = column.take(np.arange(len(column))[rows])
    values = BlockAccessor.for_block(taken).to_numpy(column.column_names[0])
    return values


def _as_slice(rows: Indices) -> Any:
    """The same positions as a slice, where they follow each other: copying those needs no index."""
    if len(rows) and rows[-1] - rows[0] == len(rows) - 1 and (len(rows) < 3 or bool((np.diff(rows) == 1).all())):
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return rows


def _each_an_object(values: Array) -> Array:
    if values.dtype.hasobject:
        return values
    objects = np.empty(len(values), dtype=object)
    objects[:] = list(values)
    return objects
