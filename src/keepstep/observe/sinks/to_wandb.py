"""Weights & Biases: one run, by an id of our own; WANDB_PROJECT, WANDB_ENTITY and WANDB_MODE are its own settings."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import wandb
from wandb.proto.wandb_internal_pb2 import Record

from keepstep.observe.sinks.base import FAILED, About, values_of, words_for

_BLOCK, _BLOCK_HEAD, _FILE_HEAD = 32768, 7, 7
"""The log format of LevelDB, in which W&B writes what it is to send."""
_FULL, _FIRST, _LAST = 1, 2, 4
_PATIENCE_S = 10.0
"""For a server that does not answer. W&B waits for it when the process ends, too; by itself it would do so for ever."""


class WeightsAndBiases:
    """Sends by W&B's own process. Offline, each attempt leaves a folder with the same id, for `wandb sync`."""

    lasting = True

    def __init__(self, about: About) -> None:
        self._about = about
        self._run: Any = None
        self._is_offline = False
        self._before: list[Path] = []
        """What earlier attempts left, offline."""
        self._num_failures = 0

    def open(self) -> str:
        is_offline = os.environ.get("WANDB_MODE") == "offline"
        self._before = self._offline_files()
        self._run = wandb.init(
            id=self._about.id,
            name=self._about.title,
            project=os.environ.get("WANDB_PROJECT", "keepstep"),
            dir=str(self._about.folder),
            config=self._about.parameters,
            resume=None if is_offline else "allow",  # which offline is not a word that it knows
            reinit="create_new",  # the script may have a run of its own
            settings=wandb.Settings(silent=True, console="off", init_timeout=_PATIENCE_S, finish_timeout=_PATIENCE_S),
        )
        self._is_offline = bool(self._run.offline)
        return f"offline, id {self._about.id}, in {self._about.folder / 'wandb'}" if self._is_offline else self._run.url

    def reached(self, noted: dict[str, int]) -> dict[str, int]:
        if not self._is_offline:
            # W&B takes no step that lies before its newest.
            return {name: min(step, self._run.step - 1) for name, step in noted.items()}
        found: dict[str, int] = {}
        for file in self._before:
            for step, names in _history(file):
                found.update(dict.fromkeys(names, step))
        return found

    def metrics(self, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            self._run.log(values_of(line), step=line["step"])

    def event(self, event: dict[str, Any]) -> None:
        words = words_for(event)
        if words is None:
            return
        kind, text = words
        self._run.summary[f"keepstep/{kind}"] = text
        if kind == "failure":
            self._num_failures += 1
            self._run.summary["keepstep/failures"] = self._num_failures

    def close(self, status: str) -> None:
        self._run.summary["keepstep/status"] = status
        self._run.finish(exit_code=1 if status == FAILED else 0)

    def abandon(self) -> None:
        if self._run is not None:
            self._run.finish(exit_code=1)

    def _offline_files(self) -> list[Path]:
        files = (self._about.folder / "wandb").glob(f"offline-run-*/run-{self._about.id}.wandb")
        return sorted(files, key=lambda file: file.stat().st_mtime)


def _history(path: Path) -> Iterator[tuple[int, set[str]]]:
    """(step, metrics) of what was logged, as far as the file goes."""
    for data in _records(path.read_bytes()):
        items = Record.FromString(data).history.item
        values = {item.key or ".".join(item.nested_key): item.value_json for item in items}
        if "_step" in values:
            yield json.loads(values["_step"]), {name for name in values if not name.startswith("_")}


def _records(data: bytes) -> Iterator[bytes]:
    place, parts = _FILE_HEAD, b""
    while place + _BLOCK_HEAD <= len(data):
        left = _BLOCK - place % _BLOCK
        if left < _BLOCK_HEAD:
            place += left
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        part = data[place + _BLOCK_HEAD : place + _BLOCK_HEAD + length]
        if len(part) < length or not _FULL <= kind <= _LAST:
            return  # cut short
        parts = part if kind in (_FULL, _FIRST) else parts + part
        place += _BLOCK_HEAD + length
        if kind in (_FULL, _LAST):
            yield parts
