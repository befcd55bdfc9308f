"""A run seen from outside: its workers' processes, their steps, and the checkpoint that is being written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from keepstep.checkpoint.store import WRITING, Store
from keepstep.errors import ConfigError
from keepstep.fingerprints.writer import this_machine
from keepstep.verify.watch import Watch


def write(folder: Path, rank: int, *lines: dict[str, object]) -> None:
    path = folder / "fingerprints" / f"rank_{rank}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines))


def start(pid: int, workers: int, machine: str | None = None) -> dict[str, object]:
    return {"start": 1.0, "pid": pid, "machine": machine or this_machine(), "world_size": workers}


def test_steps_and_processes_are_followed_through_a_restart(tmp_path: Path) -> None:
    watch = Watch(tmp_path)
    watch.look()
    assert (watch.starts, watch.step, watch.furthest) == (0, 0, 0)
    write(tmp_path, 0, start(10, 2), {"step": 1, "epoch": 0}, {"step": 2, "epoch": 0})
    write(tmp_path, 1, start(11, 2), {"layout": []}, {"step": 1, "epoch": 0})
    watch.look()
    watch.look()
    assert (watch.starts, watch.step, watch.furthest, watch.pids((0, 1))) == (1, 1, 2, [10, 11])
    write(tmp_path, 0, start(20, 2))
    watch.look()
    assert (watch.starts, watch.workers[0].step, watch.furthest) == (2, 0, 1)
    write(tmp_path, 0, {"step": 2, "epoch": 0}, {"step": 3, "epoch": 0})
    watch.look()
    assert (watch.starts, watch.step) == (2, 1)  # rank 1 is not back yet
    write(tmp_path, 1, start(21, 2), {"step": 2, "epoch": 0}, {"step": 3, "epoch": 0})
    watch.look()
    assert (watch.step, watch.pids((1,))) == (3, [21])


def test_half_a_line_waits_for_its_rest(tmp_path: Path) -> None:
    write(tmp_path, 0, start(10, 1))
    path = tmp_path / "fingerprints" / "rank_0.jsonl"
    watch = Watch(tmp_path)
    with path.open("a") as file:
        file.write('{"step": 1')
    watch.look()
    assert watch.step == 0
    with path.open("a") as file:
        file.write('2, "epoch": 0}\n')
    watch.look()
    assert watch.step == 12


def test_workers_of_other_machines_are_not_killed(tmp_path: Path) -> None:
    write(tmp_path, 0, start(10, 1, "elsewhere"))
    watch = Watch(tmp_path)
    watch.look()
    with pytest.raises(ConfigError, match="rank 0 runs on another machine"):
        watch.pids((0,))


def test_an_unfinished_checkpoint_is_seen_and_a_finished_one_is_not(tmp_path: Path) -> None:
    watch, store = Watch(tmp_path), Store(tmp_path / "checkpoints", keep=1)
    assert watch.being_saved() == set()
    store.begin(12, "ab12cd34")
    store.path(6).mkdir()
    (store.root / f"{WRITING}gone-step_00000003").mkdir()
    assert watch.being_saved() == {12}
