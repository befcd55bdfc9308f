"""TensorBoard: event files in the run folder. `tensorboard --logdir runs` shows all runs."""

from __future__ import annotations

import itertools
import os
import socket
import time
from pathlib import Path
from typing import IO, Any

from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard.summary import hparams, scalar, text

from keepstep.observe.sinks.base import About, values_of, words_for

_OURS = ("_hparams_/", "keepstep/")
"""How the names begin of what is no metric."""
_numbers = itertools.count()


class TensorBoard:
    """Each attempt adds a file to the same folder; TensorBoard shows them as one.

    Written without SummaryWriter, whose thread hides errors (a full disk) until later, or for good.
    """

    lasting = True

    def __init__(self, about: About) -> None:
        self._about = about
        folder = about.folder / "tensorboard"
        self._folder = folder if about.series == 1 else folder / f"again_{about.series}"
        self._before: list[Path] = []
        """The files of earlier attempts, the newest last."""
        self._file: IO[bytes] | None = None

    def open(self) -> str:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._before = sorted(self._folder.glob("events.out.tfevents.*"))
        name = f"{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_numbers)}"
        self._file = (self._folder / f"events.out.tfevents.{name}").open("xb")
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        if not self._before:
            for summary in hparams(dict(self._about.parameters), {}):
                self._add(summary, 0)
        self._file.flush()
        return f"tensorboard --logdir {self._folder}"

    def reached(self, noted: dict[str, int]) -> dict[str, int]:
        """What was noted is there. The file that was being written may have more."""
        for file in reversed(self._before):
            newer: dict[str, int] = {}
            for event in EventFileLoader(str(file)).Load():  # a record that was cut short ends it
                newer.update({value.tag: event.step for value in event.summary.value if not _is_ours(value.tag)})
            if newer:
                return {name: max(noted.get(name, -1), newer.get(name, -1)) for name in {**noted, **newer}}
        return noted

    def metrics(self, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            for name, value in values_of(line).items():
                self._add(scalar(name, value), line["step"])
        self._flush()

    def event(self, event: dict[str, Any]) -> None:
        words = words_for(event)
        if words is not None:
            self._add(text(f"keepstep/{words[0]}", words[1]), _step(event))

    def close(self, status: str) -> None:
        self._add(text("keepstep/status", status), 0)
        self._flush()
        self.abandon()

    def abandon(self) -> None:
        if self._file is not None:
            self._file.close()

    def _add(self, summary: Any, step: int) -> None:
        self._write(Event(wall_time=time.time(), step=step, summary=summary))

    def _write(self, event: Any) -> None:
        RecordWriter(self._file).write(event.SerializeToString())

    def _flush(self) -> None:
        assert self._file is not None
        self._file.flush()


def _is_ours(tag: str) -> bool:
    return tag.startswith(_OURS)


def _step(event: dict[str, Any]) -> int:
    failures = event.get("failures") or [{}]
    return int(event.get("step", failures[0].get("step", 0)))
