"""One checkpoint for all: whatever strategy saved it, at whatever world size, any other goes on from it."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from contract.jobs import Combination, Done, job, run_and_kill
from keepstep.engines import Outcome
from keepstep.folder import RunFolder

STRATEGIES = ("single", "ddp", "fsdp", "fsdp2", "zero1", "zero2", "zero3")
_PLAIN = ["--plain", "--size", "50"]  # the last batch has 2 samples: fewer than 4 workers
_SAVED_AT, _LOSSES = 10, 24
Cell = tuple[Combination, Combination]


def _combination(strategy: str, world_sizes: tuple[int, ...], chance: random.Random) -> Combination:
    workers = 1 if strategy == "single" else chance.choice(world_sizes)
    return Combination("inprocess" if workers == 1 and chance.random() < 0.5 else "torchrun", strategy, workers)


def cells(seed: int, rounds: int, world_sizes: tuple[int, ...]) -> Iterator[Cell]:
    """Pairs of (saved by, resumed by): in each round every strategy is once the one and once the other."""
    chance = random.Random(seed)
    shifts = chance.sample(range(len(STRATEGIES)), rounds)
    for shift in shifts:
        for number, strategy in enumerate(STRATEGIES):
            other = STRATEGIES[(number + shift) % len(STRATEGIES)]
            yield _combination(strategy, world_sizes, chance), _combination(other, world_sizes, chance)


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("matrix")


@cache
def _calm(storage: Path) -> Done:
    assert job(storage, "calm", Combination("inprocess", "single", 1), _PLAIN) is Outcome.FINISHED
    return Done(RunFolder(storage, "calm"))


@cache
def _killed(storage: Path, saved_by: Combination) -> Path:
    name = f"killed-{saved_by}"
    run_and_kill(storage, name, saved_by, _PLAIN)
    return storage / name


def _goes_on(storage: Path, saved_by: Combination, resumed_by: Combination) -> None:
    name = f"{saved_by}-to-{resumed_by}"
    shutil.copytree(_killed(storage, saved_by), storage / name)
    assert job(storage, name, resumed_by, _PLAIN) is Outcome.FINISHED
    expected, found = _calm(storage), Done(RunFolder(storage, name))
    assert [event["step"] for event in found.events("resumed")] == [_SAVED_AT]
    assert found.samples == expected.samples
    assert len(found.losses) == _LOSSES
    torch.testing.assert_close(torch.tensor(found.losses), torch.tensor(expected.losses), rtol=1e-4, atol=1e-5)
    (_, tensors), (_, calm) = found.state(), expected.state()
    here, there = ({key for key in kept if not key.startswith("rank_")} for kept in (tensors, calm))
    assert here == there
    for key in here:
        if key.startswith(("model/", "optimizer/")):
            torch.testing.assert_close(tensors[key], calm[key], rtol=2e-3, atol=1e-4)


def _whole(storage: Path, rounds: int, world_sizes: tuple[int, ...]) -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    for saved_by, resumed_by in cells(seed, rounds, world_sizes):
        print(f"saved by {saved_by}, resumed by {resumed_by}")
        _goes_on(storage, saved_by, resumed_by)


@pytest.mark.timeout(600)
def test_any_strategy_goes_on_from_any_other(storage: Path) -> None:
    """A sample of the 7 × 7 strategies × world sizes, drawn afresh in every run: each saves once and resumes once."""
    _whole(storage, rounds=1, world_sizes=(1, 2))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_strategy_goes_on_from_every_other(storage: Path) -> None:
    """All 49 pairs of strategies, at world sizes drawn afresh."""
    _whole(storage, rounds=5, world_sizes=(1, 2, 4))
