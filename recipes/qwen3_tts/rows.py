"""Rows of a voice's data: JSON lines whose paths are relative to their own folder, so that the folder can be moved."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from keepstep.data.fetch import whole_file

Row = dict[str, Any]
PATHS = ("audio", "ref_audio", "source", "base", "fine_tuned", "real")
"""Fields that name files."""


def read_rows(path: str | Path, needed: Sequence[str] = ("audio", "text")) -> list[Row]:
    """The rows of a JSONL file, their paths made absolute; a line that is none, or lacks a field, is named."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path} is not there: it is written by the stage before this one")
    rows = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                rows.append(_absolute(_parse(line, f"{path}, line {number}", needed), path.parent))
    if not rows:
        raise ValueError(f"{path} has no rows")
    return rows


def write_rows(path: str | Path, rows: Iterable[Row]) -> None:
    """Writes rows; the file is there whole or not at all."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        for row in rows:
            file.write(json.dumps(_relative(row, path.parent), ensure_ascii=False).encode() + b"\n")


def _parse(line: str, where: str, needed: Sequence[str]) -> Row:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is no JSON ({error}): one object a line is expected") from error
    if not isinstance(row, dict):
        raise ValueError(f"{where} is a {type(row).__name__}: an object with {', '.join(needed)} is expected")
    if missing := [name for name in needed if row.get(name) in (None, "")]:
        raise ValueError(f"{where} lacks {', '.join(missing)}; it has {', '.join(row)}")
    return row


def _absolute(row: Row, folder: Path) -> Row:
    named = {name: str((folder / row[name]).resolve()) for name in PATHS if isinstance(row.get(name), str)}
    return row | named


def _relative(row: Row, folder: Path) -> Row:
    folder = folder.resolve()
    named = {}
    for name in PATHS:
        if isinstance(row.get(name), str):
            path = Path(row[name]).absolute()
            named[name] = path.relative_to(folder).as_posix() if path.is_relative_to(folder) else str(path)
    return row | named
