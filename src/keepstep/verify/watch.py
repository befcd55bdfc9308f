"""Follows a run from outside, by its workers' fingerprints: who they are, which step each has completed."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keepstep.checkpoint.store import WRITING, step_of
from keepstep.errors import ConfigError
from keepstep.fingerprints.writer import FOLDER, this_machine

_STEP = re.compile(rb'\{"step": (\d+),')


@dataclass
class Worker:
    """One rank, through all of its processes."""

    pid: int = 0
    starts: int = 0
    step: int = 0
    """The newest that its present process has completed."""
    world_size: int = 0
    begin: dict[str, Any] = field(default_factory=dict)
    offset: int = 0
    rest: bytes = b""


class Watch:
    """The workers of one run folder. Reads what is new in their files; cheap enough to be asked every millisecond."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.workers: dict[int, Worker] = {}

    def look(self) -> None:
        for rank in range(max(1, self.world_size)):
            worker = self.workers.setdefault(rank, Worker())
            try:
                with (self._folder / FOLDER / f"rank_{rank}.jsonl").open("rb") as file:
                    file.seek(worker.offset)
                    news = file.read()
            except FileNotFoundError:
                continue
            worker.offset += len(news)
            *lines, worker.rest = (worker.rest + news).split(b"\n")
            for line in lines:
                _take_in(worker, line)

    @property
    def world_size(self) -> int:
        return self.workers[0].world_size if 0 in self.workers else 0

    @property
    def starts(self) -> int:
        """How often rank 0 has started."""
        return self.workers[0].starts if 0 in self.workers else 0

    @property
    def step(self) -> int:
        """The step that every worker has completed."""
        return min((worker.step for worker in self._present()), default=0)

    @property
    def furthest(self) -> int:
        """The step that any worker has completed."""
        return max((worker.step for worker in self._present()), default=0)

    def _present(self) -> list[Worker]:
        return [worker for rank, worker in self.workers.items() if rank < self.world_size]

    def pids(self, ranks: tuple[int, ...]) -> list[int]:
        """The workers' process ids; raises if they are on other machines."""
        here = this_machine()
        elsewhere = [rank for rank in ranks if self.workers[rank].begin.get("machine") != here]
        if elsewhere:
            raise ConfigError(
                f"rank {elsewhere[0]} runs on another machine or in another container; verify kills workers by their "
                "process ids and so needs all of them on this machine"
            )
        return [self.workers[rank].pid for rank in ranks]

    def being_saved(self) -> set[int]:
        """The steps of which an unfinished checkpoint is there."""
        try:
            names = [entry.name for entry in (self._folder / "checkpoints").iterdir()]
        except FileNotFoundError:
            return set()
        unfinished = (name.removeprefix(WRITING).rpartition("-")[0] for name in names if name.startswith(WRITING))
        return {step for step in map(step_of, unfinished) if step is not None}


def _take_in(worker: Worker, line: bytes) -> None:
    if match := _STEP.match(line):
        worker.step = int(match[1])
    elif line.startswith(b'{"start"'):
        worker.begin = json.loads(line)
        worker.pid, worker.world_size = worker.begin["pid"], worker.begin["world_size"]
        worker.starts += 1
        worker.step = 0
