"""Reads back what the workers of a run have noted of their steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keepstep.fingerprints.writer import DIGITS, FOLDER
from keepstep.folder import read_lines


@dataclass
class Print:
    """One completed step of one worker."""

    step: int
    batches: list[dict[str, Any]]
    rng: dict[str, str]
    state: dict[tuple[str, str], str]
    """(kind, name) → hash."""
    variables: dict[str, str]


@dataclass
class Attempt:
    """What one worker did between its start and its end."""

    world_size: int
    begin: dict[str, Any]
    prints: list[Print] = field(default_factory=list)


@dataclass(frozen=True)
class Suspect:
    """A place in the user's code that asks for what is never the same twice."""

    kind: str
    what: str
    file: str
    line: int
    in_data: bool

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"


def read_attempts(run: Path) -> dict[int, list[Attempt]]:
    """Rank → its attempts, oldest first."""
    found: dict[int, list[Attempt]] = {}
    for path in sorted((run / FOLDER).glob("rank_*.jsonl")):
        attempts: list[Attempt] = []
        layout: list[tuple[str, str]] = []
        for line in read_lines(path):
            if "start" in line:
                attempts.append(Attempt(line["world_size"], line))
            elif "layout" in line:
                layout = [(kind, name) for kind, name in line["layout"]]
            elif attempts and "step" in line:
                attempts[-1].prints.append(_print(line, layout))
        found[int(path.stem.removeprefix("rank_"))] = attempts
    return found


def read_files(run: Path) -> list[str]:
    """The user's files that rank 0 had imported."""
    lines = read_lines(run / FOLDER / "rank_0.jsonl")
    return list(next((line["files"] for line in lines if "files" in line), []))


def _print(line: dict[str, Any], layout: list[tuple[str, str]]) -> Print:
    text = line["state"]
    hashes = [text[place : place + DIGITS] for place in range(0, len(text), DIGITS)]
    return Print(line["step"], line["batches"], line["rng"], dict(zip(layout, hashes, strict=True)), line["variables"])


def read_suspects(run: Path) -> list[Suspect]:
    """Every place once, whichever worker came by."""
    lines = (line for path in sorted((run / FOLDER).glob("suspects_*.jsonl")) for line in read_lines(path))
    return list(dict.fromkeys(Suspect(**line) for line in lines))
