"""Notes which samples each step consumed, and counts those that the final weights are made of.

Each worker of each attempt appends to a file of its own, OUTPUT/consumed/ATTEMPT_rank_R.jsonl: first the step that it
goes on from, then a line a step. Appended and never rewritten, so that a SIGKILL loses nothing that was written.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

Ids = dict[int, Counter[int]]
"""How often each sample was consumed, by epoch."""


class Consumed:
    """One per worker and attempt; `from_step`: the step that its weights are from, 0 at the very beginning."""

    def __init__(self, output: str | Path, rank: int, from_step: int) -> None:
        folder = Path(output) / "consumed"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{_attempt_name()}_rank_{rank}.jsonl"
        self._file = path.open("a", buffering=1)  # line by line: what this process wrote survives it
        self._write({"rank": rank, "pid": os.getpid(), "from_step": from_step, "time": time.time()})

    def add(self, step: int, epoch: int, ids: torch.Tensor, loss: torch.Tensor) -> None:
        """A step that was made; `step` counts them from 1, `loss` is the mean over this worker's `ids`."""
        line = {"step": step, "epoch": epoch, "time": time.time(), "loss": loss.item(), "ids": ids.tolist()}
        self._write(line)

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")


def _attempt_name() -> str:
    """The same for all workers of an attempt, and sorted by time: when rank 0 began."""
    began = torch.tensor([time.time_ns()])
    if dist.is_initialized():
        began = began.cuda() if dist.get_backend() == "nccl" else began
        dist.broadcast(began, src=0)
    return str(began.item())


class Step(NamedTuple):
    """What one worker did in one step."""

    step: int
    epoch: int
    time: float
    loss: float
    ids: list[int]


@dataclass
class Attempt:
    """From a start of all workers to their end, or to the death of one."""

    began: float
    from_step: int
    pids: dict[int, int]
    """By rank."""
    steps: list[Step]


def attempts(output: str | Path) -> list[Attempt]:
    """All attempts, the first first; of those under way, what has been written until now."""
    found: dict[str, Attempt] = {}
    for path in sorted((Path(output) / "consumed").glob("*_rank_*.jsonl")):
        lines = list(_whole_lines(path))
        if not lines:
            continue
        start, *steps = lines
        attempt = found.setdefault(path.name.partition("_")[0], Attempt(start["time"], start["from_step"], {}, []))
        attempt.pids[start["rank"]] = start["pid"]
        attempt.steps += [Step(**line) for line in steps]
    return [found[name] for name in sorted(found)]


def _whole_lines(path: Path) -> Iterable[dict[str, Any]]:
    for line in path.read_text().splitlines(keepends=True):
        if line.endswith("\n"):  # else its worker was killed within the line, and that step is in no checkpoint
            yield json.loads(line)


def history(made: list[Attempt]) -> list[Step]:
    """The steps that the last attempt's weights are made of.

    An attempt that goes on from step k has the weights of step k: all that was made after it, and not saved, is gone
    from them, whichever attempt made it.
    """
    kept: list[Step] = []
    for attempt in made:
        kept = [step for step in kept if step.step <= attempt.from_step] + attempt.steps
    return sorted(kept, key=lambda step: step.step)


def times_consumed(steps: list[Step]) -> Ids:
    counted: Ids = defaultdict(Counter)
    for step in steps:
        counted[step.epoch].update(step.ids)
    return counted


def losses(steps: list[Step]) -> dict[int, float]:
    """Each step's loss over its samples on all workers."""
    total: dict[int, float] = defaultdict(float)
    samples: dict[int, int] = defaultdict(int)
    for step in steps:
        total[step.step] += step.loss * len(step.ids)
        samples[step.step] += len(step.ids)
    return {step: total[step] / samples[step] for step in total}


@dataclass(frozen=True)
class Tally:
    """Of all samples in all epochs: how often the final weights have seen them."""

    once: int
    repeated: int
    """Seen twice or more in one epoch."""
    lost: int
    """Not seen in an epoch."""
    redone: int
    """Samples that were computed for nothing: steps made after the last checkpoint before a death."""

    def __str__(self) -> str:
        return (
            f"in the weights, of {self.once + self.repeated + self.lost} samples (of all epochs): {self.once} once, "
            f"{self.repeated} repeated, {self.lost} lost\ncomputed for nothing: {self.redone} samples"
        )

    @property
    def exactly_once(self) -> bool:
        return not self.repeated and not self.lost and bool(self.once)


def tally(output: str | Path, num_samples: int, num_epochs: int) -> Tally:
    made = attempts(output)
    kept = history(made)
    counted = times_consumed(kept)
    times = [counted[epoch][sample] for epoch in range(num_epochs) for sample in range(num_samples)]
    work = sum(len(step.ids) for attempt in made for step in attempt.steps)
    return Tally(
        once=times.count(1),
        repeated=sum(each > 1 for each in times),
        lost=times.count(0),
        redone=work - sum(len(step.ids) for step in kept),
    )
