"""Columns between Arrow, which files hold, and NumPy, which the user's function takes and returns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from keepstep.errors import ConfigError, DataError


class Batch(dict[str, np.ndarray[Any, Any]]):
    """Column → array. A column that is not there is answered with those that are."""

    def __missing__(self, name: str) -> np.ndarray[Any, Any]:
        raise DataError(f"there is no column {name!r} in the data; there are {', '.join(self)}")


def to_numpy(batch: Any) -> Batch:
    return Batch({name: _writable(_array(column)) for name, column in zip(batch.schema.names, batch, strict=True)})


def _array(column: Any) -> np.ndarray[Any, Any]:
    kind = column.type
    if isinstance(kind, pa.FixedShapeTensorType):
        tensor: np.ndarray[Any, Any] = column.to_numpy_ndarray()
        return tensor
    if pa.types.is_fixed_size_list(kind) and not column.null_count:
        flat = _array(column.flatten())
        return flat.reshape(len(column), kind.list_size, *flat.shape[1:])
    array: np.ndarray[Any, Any] = column.to_numpy(zero_copy_only=False)
    return array


def _writable(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """torch warns of arrays that cannot be written, and Arrow's memory must not be."""
    return array if array.flags.writeable else array.copy()


def to_arrow(name: str, array: np.ndarray[Any, Any]) -> Any:
    """Further dimensions than the rows become lists of a fixed size, which every reader of Parquet knows."""
    try:
        if array.ndim == 1:
            return pa.array(array)
        flat = pa.array(np.ascontiguousarray(array).reshape(-1))
        for size in reversed(array.shape[1:]):
            # Named as it is when it is read back: parts of two starts must have one schema.
            kind = pa.list_(pa.field("element", flat.type), size)
            flat = pa.FixedSizeListArray.from_arrays(flat, type=kind)
        return flat
    except (pa.ArrowException, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())[:120]
        raise ConfigError(
            f"predict returned {name!r} as an array of {array.dtype}, which Parquet cannot hold ({reason}); return "
            "numbers, strings or bytes"
        ) from None


def chosen_columns(schema: Any, keep: str | None) -> tuple[str, ...]:
    """The input columns that are written beside the predictions: those named, or all that are single values."""
    if keep is None:
        return tuple(field.name for field in schema if _is_light(field.type))
    names = [name.strip() for name in keep.split(",") if name.strip()]
    for name in names:
        if name not in schema.names:
            raise ConfigError(f"--keep names {name!r}, which the data has not; it has {', '.join(schema.names)}")
    return tuple(dict.fromkeys(names))


def _is_light(kind: Any) -> bool:
    """Ids, labels, texts, times: not images, sounds and vectors, which would be stored twice."""
    types = pa.types
    is_bytes = types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind)
    return not (types.is_nested(kind) or is_bytes or isinstance(kind, pa.BaseExtensionType))
