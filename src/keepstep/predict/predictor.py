"""Makes parts of pieces: reads rows, calls the user's function, writes what it returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from keepstep.config import StrategyConfig
from keepstep.device import choose_device
from keepstep.errors import ConfigError, DataError, KeepstepError
from keepstep.predict.agreement import pack, unpack
from keepstep.predict.columns import Batch, to_arrow, to_numpy
from keepstep.predict.model import load_weights
from keepstep.predict.output import open_output, part_name
from keepstep.predict.place import READ_ERRORS, Place, in_words
from keepstep.predict.request import Task
from keepstep.predict.script import Script
from keepstep.predict.source import Piece
from keepstep.show import existing_run

_WRITTEN_AT_ONCE = 64 << 20
"""Bytes of predictions that become one row group: one a batch would be many small ones."""

Rows = tuple[int, Any, Batch]
"""The first row's number in its file, the rows as Arrow has them and as the user's function takes them."""


class Predictor:
    """One copy of the model, and the pieces it is used on."""

    def __init__(self, task: Task, agree: Callable[[bytes], bytes]) -> None:
        self._task, self._agree = task, agree
        self._place, self._output = Place.open(task.data), open_output(task.output)
        self._script = Script(Path(task.script).absolute())
        device = choose_device(StrategyConfig(device=task.device), 0, 1)
        model = self._script.make_model()
        store = existing_run(task.storage, task.name).store_to_read()
        load_weights(model, store, task.step, task.model)
        self._model = model.to(device).eval()
        self._schema: Any = None

    def run(self, piece: Piece, on_rows: Callable[[int], None] = lambda _: None) -> None:
        """Writes a piece's part. `on_rows` is told of the rows as they are predicted."""
        with self._output.writing(part_name(piece.number)) as path, _Writer(path) as writer:
            for first, rows, batch in _ahead(self._read(piece)):
                writer.write(self._predicted(piece, first, rows, batch))
                on_rows(len(rows))
            if writer.rows != piece.rows:
                raise DataError(f"{piece.file} has changed: {writer.rows} of {piece.rows} rows were read; start again")

    def _read(self, piece: Piece) -> Iterator[Rows]:
        position = 0
        end = piece.skip + piece.rows
        try:
            with self._place.open_parquet(piece.path) as file:
                for batch in file.iter_batches(self._task.batch_size, row_groups=list(piece.groups)):
                    low, high = max(piece.skip - position, 0), min(end - position, len(batch))
                    if low < high:
                        rows = batch.slice(low, high - low)
                        yield piece.first_row + position + low - piece.skip, rows, to_numpy(rows)
                    position += len(batch)
                    if position >= end:
                        return
        except READ_ERRORS as error:
            first = piece.first_row + max(position - piece.skip, 0)
            where = _where(piece, first, piece.first_row + piece.rows - first)
            raise DataError(f"{where} cannot be read ({in_words(error)})") from error

    def _predicted(self, piece: Piece, first: int, rows: Any, batch: Batch) -> Any:
        """Rows to write: the columns that are kept, and those that are predicted."""
        try:
            returned = self._script.predict(self._model, batch, len(rows))
            arrays = {name: rows.column(name) for name in self._task.keep}
            for name, array in returned.items():
                if name in arrays:
                    raise ConfigError(
                        f"predict returned {name!r}, which is also a column that is kept from the data; give it "
                        "another name, or say with --keep which columns to keep"
                    )
                arrays[name] = to_arrow(name, array)
            return self._as_agreed(arrays, len(rows))
        except KeepstepError as error:
            raise type(error)(f"{error}; {_where(piece, first, len(rows))}") from None
        except Exception as error:
            advice = "; a smaller --batch-size may do" if isinstance(error, torch.OutOfMemoryError) else ""
            start, count = self._narrowed(rows, error)
            where = _where(piece, first + start, count)
            raise DataError(f"{where}: {self._script.described(error)}{advice}") from error

    def _narrowed(self, rows: Any, error: Exception) -> tuple[int, int]:
        """The rows, of those that the user's function failed on, that it fails on also without the others."""
        start, count = 0, len(rows)
        if isinstance(error, (torch.OutOfMemoryError, torch.AcceleratorError)):  # no row's fault, or the device is lost
            return start, count
        while count > 1:
            half = count // 2
            if self._fails(rows.slice(start, half)):
                count = half
            elif self._fails(rows.slice(start + half, count - half)):
                start, count = start + half, count - half
            else:
                break
        return start, count

    def _fails(self, rows: Any) -> bool:
        try:
            self._script.predict(self._model, to_numpy(rows), len(rows))
        except KeepstepError:
            return False
        except Exception:
            return True
        return False

    def _as_agreed(self, arrays: dict[str, Any], rows: int) -> Any:
        if self._schema is None:
            self._schema = self._agreed(arrays)
        expected = {field.name: field.type for field in self._schema}
        for name in expected | arrays:
            if name not in arrays or name not in expected:
                raise ConfigError(
                    f"predict returned columns {', '.join(arrays)}; before it was {', '.join(expected)}: return the "
                    "same ones for every batch"
                )
            if pa.types.is_null(arrays[name].type):
                arrays[name] = pa.nulls(rows, expected[name])
            if arrays[name].type != expected[name]:
                raise ConfigError(
                    f"predict returned {name!r} as {arrays[name].type}; before it was {expected[name]}: return the "
                    "same type and shape for every batch"
                )
        return pa.table({name: arrays[name] for name in expected}, schema=self._schema)

    def _agreed(self, arrays: dict[str, Any]) -> Any:
        schema = pa.schema([pa.field(name, array.type) for name, array in arrays.items()])
        for field in schema:
            if field.name not in self._task.keep and pa.types.is_null(field.type):
                raise ConfigError(
                    f"predict returned {field.name!r} with nothing but None in the first batch, which says no type; "
                    "return an array of numbers (with NaN) or of texts"
                )
        return unpack(self._agree(pack(schema)))


class _Writer:
    """A Parquet file that is written in row groups of a reasonable size."""

    def __init__(self, path: Path) -> None:
        self._path, self.rows = path, 0
        self._waiting: list[Any] = []
        self._file: Any = None

    def __enter__(self) -> _Writer:
        return self

    def write(self, table: Any) -> None:
        self._waiting.append(table)
        self.rows += len(table)
        if sum(waiting.nbytes for waiting in self._waiting) >= _WRITTEN_AT_ONCE:
            self._flush()

    def _flush(self) -> None:
        if not self._waiting:
            return
        table = pa.concat_tables(self._waiting)
        self._waiting = []
        if self._file is None:
            self._file = pq.ParquetWriter(self._path, table.schema)
        self._file.write_table(table)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._flush()
        if self._file is not None:
            self._file.close()


def _ahead(batches: Iterator[Rows]) -> Iterator[Rows]:
    """The same, each read while the one before is predicted."""
    with ThreadPoolExecutor(1, "keepstep-read") as thread:
        following = thread.submit(next, batches, None)
        while (batch := following.result()) is not None:
            following = thread.submit(next, batches, None)
            yield batch


def _where(piece: Piece, first: int, count: int) -> str:
    rows = f"rows {first:,} to {first + count - 1:,}" if count > 1 else f"row {first:,}"
    return f"{rows} of {piece.file}"
