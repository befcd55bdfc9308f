"""The rows to predict, cut into pieces: each is done whole or not at all."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import xxhash

from keepstep.errors import DataError
from keepstep.predict.place import READ_ERRORS, Place, in_words

_LEAST_ROWS = 2048
"""Row groups of a file are taken together until a piece has as many: a part a handful of rows would be a nuisance."""
_MOST_ROWS = 32768
_MOST_CUTS = 8
"""A larger row group is cut, for else one worker had it alone and a kill lost all of it. But each cut is read from the
group's beginning: there is no other way into one."""
_READERS = 16


@dataclass(frozen=True)
class Piece:
    """Rows of one file that follow each other."""

    number: int
    file: str
    path: str
    groups: tuple[int, ...]
    skip: int
    """Rows of these groups that belong to the pieces before."""
    first_row: int
    """In the file."""
    rows: int

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Piece:
        raw = json.loads(text)
        return cls(**{**raw, "groups": tuple(raw["groups"])})


@dataclass(frozen=True)
class Source:
    """All pieces of the data, in its order, and what the data is recognised by."""

    pieces: list[Piece]
    schema: Any
    num_files: int
    digest: str

    @property
    def rows(self) -> int:
        return sum(piece.rows for piece in self.pieces)


def find_source(place: Place) -> Source:
    """Reads what the files say of themselves, and nothing else of them."""
    paths = place.parquet_files()
    with ThreadPoolExecutor(_READERS) as threads:
        footers = list(threads.map(lambda named: _read_footer(place, *named), paths.items()))
    _check_columns(dict(zip(paths, footers, strict=True)))
    pieces: list[Piece] = []
    hasher = xxhash.xxh3_128()
    for (file, path), footer in zip(paths.items(), footers, strict=True):
        for cut in _cuts(footer.group_rows):
            pieces.append(Piece(len(pieces), file, path, *cut))
            hasher.update(repr(cut).encode())
        hasher.update(footer.digest.encode())
    if not pieces:
        raise DataError(f"{place.address} has no rows ({len(paths)} files)")
    return Source(pieces, footers[0].schema, len(paths), hasher.hexdigest())


@dataclass(frozen=True)
class _Footer:
    group_rows: list[int]
    schema: Any
    digest: str


def _read_footer(place: Place, file: str, path: str) -> _Footer:
    try:
        with place.files.open_input_file(path) as opened:
            size = opened.size()
            # The places, sizes and limits of every column chunk: other rows have another footer, a copy has the same.
            length = int.from_bytes(opened.read_at(4, max(size - 8, 0)), "little")
            footer = opened.read_at(min(length, size), max(size - 8 - length, 0))
        with place.open_parquet(path) as parquet:
            metadata, schema = parquet.metadata, parquet.schema_arrow
    except READ_ERRORS as error:
        raise DataError(f"{file} of {place.address} cannot be read as Parquet ({in_words(error)})") from None
    rows = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
    return _Footer(rows, schema.remove_metadata(), xxhash.xxh3_128(footer + size.to_bytes(8, "little")).hexdigest())


def _check_columns(footers: dict[str, _Footer]) -> None:
    """Raises unless all files have the same columns, whatever their order."""
    first, *others = footers
    expected = {field.name: field.type for field in footers[first].schema}
    for file in others:
        found = {field.name: field.type for field in footers[file].schema}
        for name in expected | found:
            if expected.get(name) != found.get(name):
                has, had = (f"as {columns[name]}" if name in columns else "not" for columns in (found, expected))
                raise DataError(
                    f"{file} has column {name!r} {has}, {first} has it {had}; all files must have the same columns: "
                    "predict them apart, each with an --output of its own"
                )


Cut = tuple[tuple[int, ...], int, int, int]
"""Row groups, rows to skip in them, the first row in the file, the number of rows."""


def _cuts(group_rows: list[int]) -> Iterator[Cut]:
    """The pieces of a file: by its row groups alone, so that they are the same in every start of the command."""
    gathered: list[int] = []
    first = total = 0
    for number, rows in enumerate(group_rows):
        gathered.append(number)
        total += rows
        if total < _LEAST_ROWS and number < len(group_rows) - 1:
            continue
        count = min(math.ceil(total / _MOST_ROWS), _MOST_CUTS)
        for place in range(count):
            start, end = total * place // count, total * (place + 1) // count
            yield tuple(gathered), start, first + start, end - start
        gathered, first, total = [], first + total, 0
