"""Follows a run folder's files as they grow: what a supervisor in another process sees of the run."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keepstep.folder import RunFolder


@dataclass(frozen=True)
class News:
    """What has come since the last look."""

    output: str
    metrics: list[dict[str, Any]]
    events: list[dict[str, Any]]


class _File:
    """New whole lines of one file. A file that was cut shorter (metrics, on a resume) is followed from its new end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = path.stat().st_size if path.exists() else 0

    def read(self) -> str:
        try:
            size = self._path.stat().st_size
        except OSError:
            return ""
        if size < self._position:
            self._position = size
        if size == self._position:
            return ""
        with self._path.open("rb") as file:
            file.seek(self._position)
            chunk = file.read()
        whole = chunk[: chunk.rfind(b"\n") + 1]
        self._position += len(whole)
        return whole.decode(errors="replace")


class Tail:
    """Rank 0's output, the metrics and the events."""

    def __init__(self, folder: RunFolder, mute_after: str) -> None:
        """`mute_after`: rank 0's output is left out from this mark on, until `unmute`."""
        self._mute_after, self._muted = mute_after, False
        self._output = _File(folder.logs / "rank_0.txt")
        self._metrics = _File(folder.metrics)
        self._events = _File(folder.events)

    def read(self) -> News:
        output = self._output.read()
        if self._muted:
            output = ""
        elif self._mute_after in output:
            self._muted = True
            output = output.partition(self._mute_after)[0]
        # A script that writes a metrics.jsonl of its own into the run folder must not end its supervisor.
        metrics = [line for line in _objects(self._metrics.read()) if "step" in line]
        return News(output, metrics, _objects(self._events.read()))

    def unmute(self) -> None:
        self._output.read()
        self._muted = False


def _objects(text: str) -> list[dict[str, Any]]:
    """The lines' objects. One that is no JSON was cut through when the file was cut back and grew again: left out."""
    objects = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            objects.append(json.loads(line))
    return objects
