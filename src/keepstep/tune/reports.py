"""The reports of a run: the lines of its metrics.jsonl in which the search's metric appears."""

from __future__ import annotations

import contextlib
import json
from collections import deque
from pathlib import Path


class Reports:
    """Follows the file as it grows, each step's report once. A run that went back after a crash makes some steps again,
    bit for bit: those are not reported twice."""

    def __init__(self, path: Path, metric: str, after_step: int) -> None:
        self._path, self._metric = path, metric
        self._position = 0
        self._waiting: deque[tuple[int, float]] = deque()
        self._newest = after_step
        self.step = after_step
        """How far the run is, whether or not it has reported."""

    def next(self) -> tuple[int, float] | None:
        """(step, value), or None if there is no new one."""
        if not self._waiting:
            self._read()
        return self._waiting.popleft() if self._waiting else None

    def _read(self) -> None:
        try:
            with self._path.open("rb") as file:
                size = file.seek(0, 2)
                if size < self._position:  # cut back, on a resume
                    self._position = 0
                file.seek(self._position)
                chunk = file.read()
        except FileNotFoundError:
            return
        whole = chunk[: chunk.rfind(b"\n") + 1]
        self._position += len(whole)
        for line in whole.splitlines():
            with contextlib.suppress(ValueError, TypeError, KeyError):  # a line that was cut through while it was read
                self._take(json.loads(line))

    def _take(self, line: dict[str, object]) -> None:
        self.step = max(self.step, int(str(line["step"])))
        if self._metric in line and int(str(line["step"])) > self._newest:
            self._newest = int(str(line["step"]))
            self._waiting.append((self._newest, float(str(line[self._metric]))))
