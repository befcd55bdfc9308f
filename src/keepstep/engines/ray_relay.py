"""Follows a run folder's files on another machine, where no folder is shared: what grew there grows here."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_MARK = ".driver"
_GROWING = ("metrics.jsonl", "events.jsonl", "logs/rank_0.txt")
_REPLACED = ("config.json",)
_LARGEST = 1 << 22


@dataclass(frozen=True)
class Piece:
    """New bytes of a file, and where they belong; what stood from there on is no more."""

    file: str
    start: int
    content: bytes


class Follower:
    """Looks for what has been added to the files, or cut from them, since the last look."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._positions = {file: _size(folder / file) for file in _GROWING}
        self._contents = dict.fromkeys(_REPLACED, b"")

    def pieces(self) -> list[Piece]:
        grown = (self._growth(file, position) for file, position in self._positions.items())
        replaced = (self._replacement(file, content) for file, content in self._contents.items())
        return [piece for piece in (*grown, *replaced) if piece is not None]

    def _replacement(self, file: str, before: bytes) -> Piece | None:
        path = self._folder / file
        content = path.read_bytes() if path.exists() else b""
        self._contents[file] = content
        return Piece(file, 0, content) if content != before else None

    def _growth(self, file: str, position: int) -> Piece | None:
        size = _size(self._folder / file)
        if size == position:
            return None
        start = min(position, size)  # metrics are cut back on a resume
        with (self._folder / file).open("rb") as opened:
            opened.seek(start)
            content = opened.read(_LARGEST)
        self._positions[file] = start + len(content)
        return Piece(file, start, content)


def write_mark(folder: Path) -> str:
    """Leaves something in the folder that tells it from any other of the same name, on another machine."""
    mark = uuid.uuid4().hex
    (folder / _MARK).write_text(mark)
    return mark


def read_mark(folder: Path) -> str | None:
    path = folder / _MARK
    return path.read_text() if path.exists() else None


def remove_mark(folder: Path) -> None:
    (folder / _MARK).unlink(missing_ok=True)


def write_pieces(folder: Path, pieces: Iterable[Piece]) -> None:
    for piece in pieces:
        path = folder / piece.file
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("r+b" if path.exists() else "w+b") as file:
            file.truncate(piece.start)
            file.seek(piece.start)
            file.write(piece.content)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
