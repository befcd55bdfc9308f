"""Runs the contract suite's script under an engine, a strategy and a number of workers, and reads what it left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from keepstep.checkpoint.dcp import Reader
from keepstep.checkpoint.store import Store
from keepstep.engines import Outcome
from keepstep.folder import RunFolder
from keepstep.job import Target
from keepstep.supervisor import supervise

SCRIPT = Path(__file__).with_name("train.py")
EVERY = 5
"""Steps between checkpoints."""


@dataclass(frozen=True)
class Combination:
    engine: str
    strategy: str
    workers: int

    def __str__(self) -> str:
        return f"{self.engine}-{self.strategy}-{self.workers}"


COMBINATIONS = [
    *(Combination("inprocess", strategy, 1) for strategy in ("single", "ddp", "fsdp", "fsdp2")),
    Combination("torchrun", "single", 1),
    *(Combination("torchrun", strategy, n) for strategy in ("ddp", "fsdp", "fsdp2") for n in (1, 2, 4)),
    Combination("inprocess", "zero3", 1),
    *(Combination("torchrun", strategy, 2) for strategy in ("zero1", "zero2", "zero3")),
    Combination("torchrun", "zero3", 4),
    Combination("ray", "single", 1),
    *(Combination("ray", strategy, 2) for strategy in ("ddp", "fsdp2", "zero3")),
    Combination("ray", "ddp", 4),
]
SLOW = [
    *(Combination("torchrun", strategy, 1) for strategy in ("single", "ddp", "fsdp", "fsdp2")),
    Combination("torchrun", "zero1", 2),
    *(Combination("torchrun", strategy, 4) for strategy in ("fsdp", "zero3")),
    *(Combination("ray", strategy, n) for strategy, n in (("single", 1), ("fsdp2", 2), ("zero3", 2), ("ddp", 4))),
]
"""Of those: left for `make slow`, since others are much like them."""


def marked(combinations: Iterable[Combination], *further: Combination) -> list[Any]:
    """For a test's parameters; `further`: slow in this test."""
    return [pytest.param(c, marks=_marks(c, is_slow=c in SLOW or c in further)) for c in combinations]


def marked_changes(changes: Iterable[tuple[Combination, Combination]]) -> list[Any]:
    """The same for pairs: every other one is slow."""
    return [pytest.param(*change, marks=_marks(*change, is_slow=n % 2 == 1)) for n, change in enumerate(changes)]


def _marks(*combinations: Combination, is_slow: bool) -> list[pytest.MarkDecorator]:
    uses_ray = any(combination.engine == "ray" for combination in combinations)
    return [pytest.mark.ray] * uses_ray + [pytest.mark.slow] * is_slow


@dataclass(frozen=True)
class Done:
    """What a run left behind."""

    folder: RunFolder

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return self.folder.read_metrics()

    @property
    def samples(self) -> dict[int, tuple[list[int], list[float]]]:
        """Step → sample ids and their random draws. A step that was made twice must have had the same ones."""
        found: dict[int, tuple[list[int], list[float]]] = {}
        for line in (self.folder.path / "samples.jsonl").read_text().splitlines():
            entry = json.loads(line)
            value = (entry["ids"], entry["draws"])
            assert found.setdefault(entry["step"], value) == value, f"step {entry['step']} saw other samples"
        return found

    @property
    def losses(self) -> list[float]:
        return [line["loss"] for line in self.metrics if "loss" in line]

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.folder.read_events() if event["event"] == kind]

    def state(self, step: int | None = None) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """A checkpoint's JSON and tensors, the newest by default."""
        store = Store(self.folder.checkpoints, keep=1)
        path = store.path(step if step is not None else store.steps()[-1])
        reader = Reader(path)
        tensors = {key: torch.empty(*_like(reader, key)) for key in json.loads((path / "tensors.json").read_text())}
        for key in tensors:
            tensors[key] = tensors[key].to(reader.shape_and_dtype(key)[1])
        reader.load(tensors)
        return json.loads((path / "state.json").read_text()), tensors


def _like(reader: Reader, key: str) -> list[int]:
    return [list(reader.shape_and_dtype(key)[0])]  # type: ignore[list-item]


def job(
    storage: Path, name: str, combination: Combination, arguments: list[str] | None = None, **settings: Any
) -> Outcome:
    """One launch, in this process but for the workers that the engine starts."""
    chosen = {
        "name": name,
        "storage": str(storage),
        "engine": combination.engine,
        "strategy": combination.strategy,
        "workers": combination.workers,
        "checkpoint_every": str(EVERY),
        "keep": 100,
        "max_failures": 9,
        "device": "cpu",
        **settings,
    }
    return supervise(chosen, Target(str(SCRIPT), tuple(arguments or []))).outcome


def command(storage: Path, name: str, combination: Combination, arguments: list[str], *flags: str) -> int:
    """One launch by the command line, in a process that may be killed; returns its exit code."""
    words = [sys.executable, "-m", "keepstep", "run", "--name", name, "--storage", str(storage), "--keep", "100"]
    words += ["--engine", combination.engine, "--strategy", combination.strategy, "--device", "cpu"]
    words += ["--workers", str(combination.workers), "--checkpoint-every", str(EVERY), *flags, str(SCRIPT), *arguments]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240, env=dict(os.environ))
    return done.returncode


def run_and_kill(storage: Path, name: str, combination: Combination, arguments: list[str]) -> list[str]:
    """Leaves a run that died in step 14 and has a checkpoint of step 10; returns the arguments that it died with."""
    kill = [*arguments, "--kill", f"body:13:{combination.workers - 1}"]
    if combination.engine == "inprocess":
        assert command(storage, name, combination, kill, "--checkpoint-mode", "sync") == -9
    else:
        assert job(storage, name, combination, kill, max_failures=0, checkpoint_mode="sync") is Outcome.FAILED
    return kill


def assert_same(expected: Done, found: Done) -> None:
    """Bitwise: metrics, samples, weights, optimizer state, generators, position."""
    assert found.metrics == expected.metrics
    assert found.samples == expected.samples
    (skeleton, tensors), (other_skeleton, other_tensors) = expected.state(), found.state()
    assert other_skeleton == skeleton
    assert sorted(other_tensors) == sorted(tensors)
    different = [key for key, tensor in tensors.items() if not torch.equal(tensor, other_tensors[key])]
    assert different == []
