"""The contract (design C1-C4), over engines × strategies × workers."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from contract.jobs import (
    COMBINATIONS,
    SLOW,
    Combination,
    Done,
    assert_same,
    command,
    job,
    marked,
    marked_changes,
    run_and_kill,
)
from keepstep.engines import Outcome
from keepstep.folder import RunFolder

_REFERENCES: dict[Combination, Done] = {}
_LAST_STEP = 24


@pytest.fixture(scope="session")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("contract")


@pytest.fixture(autouse=True)
def _ray(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' own Ray, where it is needed."""
    if request.node.get_closest_marker("ray"):
        monkeypatch.setenv("RAY_ADDRESS", request.getfixturevalue("ray_address"))


def reference(storage: Path, combination: Combination) -> Done:
    """A run that nobody disturbed; made once a combination."""
    if combination not in _REFERENCES:
        name = f"calm-{combination}"
        assert job(storage, name, combination) is Outcome.FINISHED
        _REFERENCES[combination] = Done(RunFolder(storage, name))
    return _REFERENCES[combination]


@pytest.mark.parametrize("combination", marked(COMBINATIONS), ids=str)
def test_trains_with_every_sample_once_an_epoch(storage: Path, combination: Combination) -> None:
    done = reference(storage, combination)
    samples = done.samples
    assert sorted(samples) == list(range(1, _LAST_STEP + 1))
    for epoch in range(6):
        ids = [index for step in range(4 * epoch + 1, 4 * epoch + 5) for index in samples[step][0]]
        assert sorted(ids) == list(range(58))
    assert [len(samples[step][0]) for step in range(1, 5)] == [16, 16, 16, 10]
    assert [line["tested"] for line in done.metrics if "tested" in line] == [17.0] * 6
    assert done.losses[-1] < done.losses[0]


@pytest.mark.parametrize("combination", marked(COMBINATIONS[1:]), ids=str)
def test_same_data_everywhere(storage: Path, combination: Combination) -> None:
    """C1: the same samples in the same order with the same augmentation, whatever the combination."""
    assert reference(storage, combination).samples == reference(storage, COMBINATIONS[0]).samples


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_same_math_under_every_strategy(storage: Path, workers: int) -> None:
    """C2: the same metrics at one world size. Bitwise up to 2 workers; with more, strategies add up their gradients in
    different orders (all-reduce, reduce-scatter), and a sum of three or more floats depends on it."""
    here = [c for c in COMBINATIONS if c.workers == workers and c.engine != "ray"]
    same = [reference(storage, c) for c in here if c not in SLOW or c in _REFERENCES]
    for done in same[1:]:
        if workers <= 2:
            assert done.metrics == same[0].metrics
        torch.testing.assert_close(torch.tensor(done.losses), torch.tensor(same[0].losses), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("combination", marked(c for c in COMBINATIONS if c.engine == "ray"), ids=str)
def test_same_math_on_ray(storage: Path, combination: Combination) -> None:
    """C2: another engine changes nothing at all."""
    elsewhere = replace(combination, engine="torchrun")
    assert reference(storage, combination).metrics == reference(storage, elsewhere).metrics


@pytest.mark.parametrize(
    "combination",
    marked(
        (c for c in COMBINATIONS if c.engine != "inprocess"),
        Combination("torchrun", "ddp", 4),
        Combination("torchrun", "fsdp", 2),
        Combination("torchrun", "fsdp2", 4),
        *(Combination("torchrun", strategy, 2) for strategy in ("zero2", "zero3")),
    ),
    ids=str,
)
def test_bitwise_the_same_after_kills(storage: Path, combination: Combination) -> None:
    """C3: SIGKILL of a random rank at a random step, of all ranks, during a save and during validation."""
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    chance = random.Random(seed)
    kills = [
        f"body:{chance.randrange(_LAST_STEP)}:{chance.randrange(combination.workers)}",
        f"save:{chance.randrange(15)}:{chance.randrange(combination.workers)}",
        f"validation:{chance.choice([8, 16])}:0",
        f"body:{chance.randrange(_LAST_STEP)}:-1",
    ]
    name = f"killed-{combination}"
    print(kills)
    assert job(storage, name, combination, ["--kill", *kills]) is Outcome.FINISHED
    killed = Done(RunFolder(storage, name))
    for number in range(len(kills)):
        assert list(killed.folder.path.glob(f"killed_{number}_*")), f"{kills[number]} never came"
    assert len(killed.events("failed")) >= 2  # two may have come at once
    assert all(event["failures"][0]["cause"] == "SIGKILL" for event in killed.events("failed"))
    assert_same(reference(storage, combination), killed)


@pytest.mark.parametrize(
    "combination",
    marked(
        (c for c in COMBINATIONS if c.engine == "inprocess"),
        Combination("inprocess", "ddp", 1),
        Combination("inprocess", "fsdp", 1),
    ),
    ids=str,
)
def test_bitwise_the_same_after_kills_in_process(storage: Path, combination: Combination) -> None:
    """C3, where nobody is left to restart the run: the same command goes on."""
    chance = random.Random()
    kills = [f"body:{chance.randrange(_LAST_STEP)}:0", f"save:{chance.randrange(15)}:0", "validation:8:0"]
    name = f"killed-{combination}"
    print(kills)
    codes = [command(storage, name, combination, ["--kill", *kills]) for _ in range(4)]
    assert codes == [-9, -9, -9, 0]
    assert_same(reference(storage, combination), Done(RunFolder(storage, name)))


_CHANGES = [
    (Combination("torchrun", "ddp", 2), Combination("inprocess", "single", 1)),
    (Combination("inprocess", "single", 1), Combination("torchrun", "fsdp2", 2)),
    (Combination("torchrun", "fsdp2", 2), Combination("torchrun", "fsdp2", 4)),
    (Combination("torchrun", "fsdp2", 2), Combination("ray", "ddp", 4)),
    (Combination("torchrun", "fsdp2", 4), Combination("torchrun", "fsdp", 2)),
    (Combination("torchrun", "fsdp", 2), Combination("torchrun", "ddp", 4)),
    (Combination("ray", "fsdp2", 2), Combination("inprocess", "single", 1)),
    (Combination("torchrun", "fsdp", 2), Combination("inprocess", "fsdp2", 1)),
]


@pytest.mark.parametrize(("first", "then"), marked_changes(_CHANGES), ids=str)
def test_goes_on_at_another_world_size_and_strategy(storage: Path, first: Combination, then: Combination) -> None:
    """C3: the same samples, and the same losses to float tolerance."""
    plain = ["--plain", "--size", "50"]  # the last batch has 2 samples: fewer than 4 workers
    calm = "calm-plain"
    if not (storage / calm).exists():
        assert job(storage, calm, Combination("inprocess", "single", 1), plain) is Outcome.FINISHED
    name = f"moved-{first}-{then}"
    kill = run_and_kill(storage, name, first, plain)
    assert job(storage, name, then, kill) is Outcome.FINISHED
    expected, moved = Done(RunFolder(storage, calm)), Done(RunFolder(storage, name))
    assert [event["step"] for event in moved.events("resumed")] == [10]
    assert moved.samples == expected.samples
    torch.testing.assert_close(torch.tensor(moved.losses), torch.tensor(expected.losses), rtol=1e-4, atol=1e-5)


def test_accumulated_parts_give_the_whole_batch_gradient(storage: Path) -> None:
    """micro: two parts, uneven last batches among them, on 1 and 2 workers, against the batch in one piece."""
    whole = Combination("inprocess", "single", 1)
    assert job(storage, "whole", whole, ["--plain"]) is Outcome.FINISHED
    parts = [
        (whole, "parts-1"),
        (Combination("torchrun", "ddp", 2), "parts-2"),
        (Combination("torchrun", "fsdp2", 2), "parts-fsdp2"),
    ]
    expected = torch.tensor(Done(RunFolder(storage, "whole")).losses)
    for combination, name in parts:
        assert job(storage, name, combination, ["--plain", "--micro", "2"]) is Outcome.FINISHED
        losses = torch.tensor(Done(RunFolder(storage, name)).losses)
        torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)


def test_loader_processes_change_nothing(storage: Path) -> None:
    combination = Combination("inprocess", "single", 1)
    assert job(storage, "workers", combination, ["--num-workers", "2"]) is Outcome.FINISHED
    assert_same(reference(storage, combination), Done(RunFolder(storage, "workers")))


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_both_ways_of_saving_hold_the_same(storage: Path, mode: str) -> None:
    combination = Combination("inprocess", "single", 1)
    assert job(storage, f"saved-{mode}", combination, checkpoint_mode=mode) is Outcome.FINISHED
    assert_same(reference(storage, combination), Done(RunFolder(storage, f"saved-{mode}")))
