"""TensorBoard: event files in the run folder. `tensorboard --logdir runs` shows all runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from keepstep.observe.sinks.base import About, values_of, words_for


class TensorBoard:
    """Each attempt adds a file to the same folder; TensorBoard shows them as one."""

    lasting = True

    def __init__(self, about: About) -> None:
        self._about = about
        folder = about.folder / "tensorboard"
        self._folder = folder if about.series == 1 else folder / f"again_{about.series}"
        self._before: list[Path] = []
        """The files of earlier attempts, the newest last."""
        self._writer: SummaryWriter | None = None

    def open(self) -> str:
        self._before = self._files()
        self._writer = SummaryWriter(str(self._folder))
        if not self._before:
            parameters: dict[str, Any] = dict(self._about.parameters)
            for summary in hparams(parameters, {}):
                self._writer.file_writer.add_summary(summary)
        return f"tensorboard --logdir {self._folder}"

    def reached(self, noted: dict[str, int]) -> dict[str, int]:
        """What was noted is there. The file that was being written may have more."""
        found = dict(noted)
        for file in self._before[-1:]:
            for event in EventFileLoader(str(file)).Load():  # a record that was cut short ends it
                for value in event.summary.value:
                    found[value.tag] = max(found.get(value.tag, -1), event.step)
        return found

    def metrics(self, lines: list[dict[str, Any]]) -> None:
        assert self._writer is not None
        for line in lines:
            for name, value in values_of(line).items():
                self._writer.add_scalar(name, value, line["step"])
        self._writer.flush()

    def event(self, event: dict[str, Any]) -> None:
        words = words_for(event)
        if words is not None:
            assert self._writer is not None
            self._writer.add_text(f"keepstep/{words[0]}", words[1], _step(event))

    def close(self, status: str) -> None:
        assert self._writer is not None
        self._writer.add_text("keepstep/status", status, 0)
        self._writer.close()

    def abandon(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _files(self) -> list[Path]:
        return sorted(self._folder.glob("events.out.tfevents.*"), key=lambda file: file.stat().st_mtime)


def _step(event: dict[str, Any]) -> int:
    failures = event.get("failures") or [{}]
    return int(event.get("step", failures[0].get("step", 0)))
