"""Follows a .jsonl file for one sink. The file is the queue: what a slow sink has not read yet waits on the disk."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_READ_BYTES = 1 << 18


class Lines:
    """A file's objects, once each, in their order; again from the start when the file was cut back (a resume)."""

    def __init__(self, path: Path, position: int = 0) -> None:
        self._path = path
        self.position = position
        """Bytes that have been read."""
        self._last = b""
        """The last line that was read: where another stands now, the file was cut and has grown again."""

    def restart(self) -> None:
        self.position, self._last = 0, b""

    def read(self) -> Iterator[dict[str, Any]]:
        """What has come since. Whoever stops in between goes on behind the last object that it got."""
        while chunk := self._chunk():
            for line in chunk.splitlines(keepends=True):
                self.position += len(line)
                self._last = line
                found = _object(line)
                if found is not None:
                    yield found

    def _chunk(self) -> bytes:
        """Whole lines, or nothing."""
        try:
            with self._path.open("rb") as file:
                start = self.position - len(self._last)
                file.seek(start)
                if start < 0 or file.read(len(self._last)) != self._last or file.seek(0, 2) < self.position:
                    self.restart()
                file.seek(self.position)
                chunk = file.read(_READ_BYTES)
                if chunk and b"\n" not in chunk:
                    chunk += file.readline()
        except FileNotFoundError:
            return b""
        return chunk[: chunk.rfind(b"\n") + 1]


def _object(line: bytes) -> dict[str, Any] | None:
    """None for what is no line of ours: a crash can cut one short."""
    try:
        found = json.loads(line.strip(b"\0\n"))
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
