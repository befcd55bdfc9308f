"""Kills workers that train on a Ray data set, changes their number, and counts the rows that they saw."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from keepstep.engines import Outcome
from keepstep.folder import RunFolder
from keepstep.job import Target
from keepstep.supervisor import supervise

pytest.importorskip("ray")
pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]
SCRIPT = Path(__file__).with_name("ray_data_train.py")


def launch(storage: Path, name: str, workers: int, words: list[str], **settings: Any) -> Outcome:
    chosen = {
        "name": name,
        "storage": str(storage),
        "engine": "torchrun" if workers > 1 or settings.get("max_failures") is not None else "inprocess",
        "workers": workers,
        "checkpoint_every": "5",
        "checkpoint_mode": "sync",
        "device": "cpu",
        **settings,
    }
    return supervise(chosen, Target(str(SCRIPT), tuple(words))).outcome


def rows_seen(storage: Path, name: str) -> dict[int, tuple[int, list[int]]]:
    """Step → epoch and rows. A step that was made twice must have had the same ones."""
    found: dict[int, tuple[int, list[int]]] = {}
    for line in (storage / name / "rows.jsonl").read_text().splitlines():
        entry = json.loads(line)
        value = entry["epoch"], entry["ids"]
        assert found.setdefault(entry["step"], value) == value, f"step {entry['step']} saw other rows"
    return found


def rows_of_epochs(seen: dict[int, tuple[int, list[int]]]) -> dict[int, Counter[int]]:
    counts: dict[int, Counter[int]] = {}
    for epoch, ids in seen.values():
        counts.setdefault(epoch, Counter()).update(ids)
    return counts


def expected_rows(kind: str, count: int) -> Counter[int]:
    if kind == "even":
        return Counter(range(count))
    return Counter(number * 10 + copy for number in range(count) if number % 5 for copy in range(number % 3))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "engine"), [("even", "torchrun"), ("uneven", "torchrun"), ("even", "ray")])
def test_every_row_once_through_five_kills_and_two_changes_of_the_number_of_workers(
    tmp_path: Path, ray_address: str, monkeypatch: pytest.MonkeyPatch, kind: str, engine: str
) -> None:
    on_ray = {"engine": "ray", "address": ray_address} if engine == "ray" else {}
    monkeypatch.setenv("KEEPSTEP_RAY_ADDRESS", ray_address)
    words = ["--kind", kind]
    assert launch(tmp_path, "whole", 1, words, max_failures=0) is Outcome.FINISHED
    whole = rows_seen(tmp_path, "whole")
    draw = random.Random(f"kills of {kind}")
    steps = sorted(draw.sample(range(2, len(whole) - 1), 5))
    killed = iter(steps)
    # The last kill of the first two launches is one more than they may survive: then others go on.
    for workers, num_kills in ((2, 2), (1, 2), (3, 1)):
        kills = [f"{next(killed)}:{draw.randrange(-1, workers)}" for _ in range(num_kills)]
        budget = {"max_failures": num_kills - (workers < 3), **on_ray}
        outcome = launch(tmp_path, "killed", workers, [*words, "--kill", *kills], **budget)
        assert outcome is (Outcome.FINISHED if workers == 3 else Outcome.FAILED)
    assert len(list((tmp_path / "killed").glob("killed_*"))) >= 5
    seen = rows_seen(tmp_path, "killed")
    assert seen == whole
    assert rows_of_epochs(seen) == {0: expected_rows(kind, 500), 1: expected_rows(kind, 500)}
    assert [ids for epoch, ids in whole.values() if epoch == 0] != [ids for epoch, ids in whole.values() if epoch == 1]
    tested = [line["tested"] for line in RunFolder(str(tmp_path), "killed").read_metrics() if "tested" in line]
    assert tested == [50, 50]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["even", "in memory"])
def test_without_a_cluster_all_workers_use_one_ray_and_it_ends_with_the_run(tmp_path: Path, kind: str) -> None:
    words = ["--kind", kind, "--rows", "100", "--epochs", "1", "--kill", "6:0"]
    assert launch(tmp_path, "local", 2, words, max_failures=1) is Outcome.FINISHED
    assert rows_of_epochs(rows_seen(tmp_path, "local")) == {0: Counter(range(100))}


@pytest.mark.slow
def test_memory_stays_while_data_of_two_gigabytes_streams_by(
    tmp_path: Path, ray_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEEPSTEP_RAY_ADDRESS", ray_address)
    script = SCRIPT.with_name("ray_data_memory.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, cwd=tmp_path, timeout=600)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    print(found)
    assert found["streamed_mib"] > 2000
    for who in ("worker", "feeder"):  # at a tenth of the way, and the most from there on
        early, most = found[f"{who}_early_mib"], found[f"{who}_most_mib"]
        assert most - early < 100, f"the {who} grew from {early} to {most} MiB"
