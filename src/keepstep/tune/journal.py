"""The search's memory, results.jsonl: every report, copy and end, as they came; what is left to do follows from it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keepstep.errors import RunFolderError
from keepstep.folder import read_lines
from keepstep.standard_json import to_json
from keepstep.tune.domain import Value

FINISHED, STOPPED_EARLY, FAILED, STOPPED = "finished", "stopped early", "failed", "stopped"
UNFINISHED, WAITING = "interrupted", "not started"


@dataclass(frozen=True)
class Copy:
    """Population based training: a trial that went on from another one's checkpoint."""

    order: int
    """Which copy of the search this is, from 1."""
    donor: int
    values_before: dict[str, Value]
    """The donor's: those that its checkpoint was made with."""


@dataclass
class Record:
    """What is known of one trial."""

    number: int
    values: dict[str, Value]
    reports: list[tuple[int, float]] = field(default_factory=list)
    """(step, value of the metric), as they came."""
    order_of_last_report: int = 0
    copy: Copy | None = None
    status: str = WAITING
    reason: str = ""
    step: int = 0

    @property
    def is_over(self) -> bool:
        return self.status in (FINISHED, STOPPED_EARLY, FAILED)

    @property
    def value(self) -> float | None:
        """The metric's last value."""
        return self.reports[-1][1] if self.reports else None

    @property
    def last_step(self) -> int:
        """Of what was reported, since it last became another's copy."""
        order = self.copy.order if self.copy else 0
        return self.reports[-1][0] if self.reports and self.order_of_last_report == order else 0

    def take(self, entry: dict[str, Any]) -> None:
        """Follows the journal by one line."""
        kind = entry["kind"]
        if kind == "report":
            self.reports.append((int(entry["step"]), float(entry["value"])))
            self.order_of_last_report = int(entry["order"])
            self.status, self.step = UNFINISHED, int(entry["step"])
        elif kind == "copy":
            self.copy = Copy(int(entry["order"]), int(entry["donor"]), dict(entry["values_before"]))
            self.values = dict(entry["values"])
        elif kind == "end":
            self.status, self.reason = str(entry["status"]), str(entry["reason"])
            self.step = int(entry["step"])


class Journal:
    """Appends to results.jsonl; a line is on the disk before anything follows from it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def entries(self) -> Iterator[dict[str, Any]]:
        return read_lines(self.path)

    def write(self, kind: str, trial: int, **fields: Any) -> dict[str, Any]:
        entry = {"kind": kind, "trial": trial, **fields}
        try:
            with self.path.open("ab+") as file:
                cut_short = file.tell() > 0 and file.seek(-1, os.SEEK_END) >= 0 and file.read(1) != b"\n"
                file.write((("\n" if cut_short else "") + to_json(entry) + "\n").encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise RunFolderError(f"{self.path} could not be written ({error.strerror or error})") from error
        return entry


def follow(records: dict[int, Record], entries: Iterable[dict[str, Any]], path: Path) -> None:
    """Brings the records up to date. Trials that were not asked for now are left out: a search may be made shorter."""
    try:
        for entry in entries:
            if entry["trial"] in records:
                records[entry["trial"]].take(entry)
    except (KeyError, TypeError, ValueError) as error:
        raise RunFolderError(f"{path} has a line that keepstep did not write ({error!r})") from None
