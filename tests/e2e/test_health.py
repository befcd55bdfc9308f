"""Real faults in real runs: each is named in words, and a hang is stopped and got over."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from keepstep.folder import RunFolder
from keepstep.observe.heart import PHASES

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "faulty_loop.py"
QUICK = ["--epochs", "1", "--step-ms", "2"]


def command(storage: Path, flags: list[str], fault: list[str]) -> list[str]:
    words = [sys.executable, "-m", "keepstep.cli", "run", "--storage", str(storage), "--name", "a", "--device", "cpu"]
    return [*words, "--checkpoint-every", "20", *flags, str(SCRIPT), *fault]


def run(storage: Path, flags: list[str], fault: list[str]) -> tuple[int, str, list[dict[str, Any]]]:
    """Its exit code, what it printed, and its events."""
    done = subprocess.run(
        command(storage, flags, fault), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120
    )
    return done.returncode, done.stdout, RunFolder(storage, "a").read_events()


def verdicts(events: list[dict[str, Any]]) -> list[tuple[str, int | None]]:
    return [(event["what"], event["rank"]) for event in events if event["event"] == "verdict"]


def losses(storage: Path) -> list[float]:
    return [line["loss"] for line in RunFolder(storage, "a").read_metrics() if "loss" in line]


@pytest.mark.parametrize(("workers", "fault"), [(2, "deadlock"), (1, "spin")])
def test_a_hang_is_shown_with_its_line_stopped_and_got_over(tmp_path: Path, workers: int, fault: str) -> None:
    flags = ["--workers", str(workers), "--hang-timeout", "2"]
    faulty = ["--fault", fault, "--rank", str(workers - 1), "--at", "50", "--once", "--steps", "120", *QUICK]
    code, output, events = run(tmp_path / "hung", flags, faulty)
    assert code == 0, output
    assert verdicts(events) == [("hang", workers - 1)]
    line = 1 + SCRIPT.read_text().splitlines().index(
        "                _HELD.acquire()" if fault == "deadlock" else "                pass"
    )
    assert f"rank {workers - 1} hangs in the step phase of step 50 since" in output
    assert f"faulty_loop.py:{line} in main" in output or f"faulty_loop.py:{line - 1} in main" in output
    (verdict,) = (event for event in events if event["event"] == "verdict")
    assert sorted(verdict["stacks"]) == [str(rank) for rank in range(workers)]
    (failed,) = (event for event in events if event["event"] == "failed")
    assert (failed["failures"][0]["cause"], failed["retry"]) == ("hang", True)
    code, output, _ = run(tmp_path / "calm", flags, [*faulty, "--fault", "none"])
    assert code == 0, output
    assert losses(tmp_path / "hung") == losses(tmp_path / "calm") and len(losses(tmp_path / "hung")) == 120


@pytest.mark.ray
@pytest.mark.slow
def test_a_hang_on_ray_too(ray_address: str, tmp_path: Path) -> None:
    flags = ["--engine", "ray", "--address", ray_address, "--workers", "2", "--hang-timeout", "2"]
    faulty = ["--fault", "deadlock", "--rank", "1", "--at", "50", "--once", "--steps", "120", *QUICK]
    code, output, events = run(tmp_path, flags, faulty)
    assert code == 0, output
    assert verdicts(events) == [("hang", 1)]
    assert "rank 0 waits in step 50 at faulty_loop.py:" in output and len(losses(tmp_path)) == 120


def test_workers_that_make_different_calls_are_told_so(tmp_path: Path) -> None:
    flags = ["--workers", "2", "--hang-timeout", "2", "--max-failures", "0"]
    code, output, events = run(tmp_path, flags, ["--fault", "skip", "--at", "50", "--steps", "120", *QUICK])
    assert code == 1, output
    assert {what for what, _ in verdicts(events)} <= {"mismatch", "hang"} and len(verdicts(events)) == 1
    assert "all must make the same collective calls in the same order" in output
    line = 1 + SCRIPT.read_text().splitlines().index("                run.mean(torch.ones(()))")
    assert f"faulty_loop.py:{line} in main" in output, "where the others were"


@pytest.mark.parametrize(
    ("workers", "fault", "strategy", "first"),
    [
        (2, "nan-layer", "ddp", "is the output of '3' (Root), whose input is at most"),
        (1, "nan-data", "single", "is the input of '0' (Linear): it comes so from the data"),
        pytest.param(2, "nan-rate", "fsdp2", "is the ", marks=pytest.mark.slow),
    ],
)
def test_the_first_tensor_that_is_no_number_is_found(
    tmp_path: Path, workers: int, fault: str, strategy: str, first: str
) -> None:
    flags = ["--workers", str(workers), "--strategy", strategy]
    code, output, events = run(tmp_path, flags, ["--fault", fault, "--at", "50", "--steps", "3000", *QUICK])
    assert code == 1, output
    assert verdicts(events) == [("loss", None)]
    assert first in output and "the first tensor that is no number any more, in step " in output
    if fault != "nan-rate":
        assert "loss is nan from step 50 on" in output and "in step 50, is the" in output
        assert max(RunFolder(tmp_path, "a").store_to_read().steps()) < 50, "what is saved is good"


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        ("rank", ("straggler", 1)),
        pytest.param("rank-loader", ("straggler", 1), marks=pytest.mark.slow),
        pytest.param("loader", ("stall", None), marks=pytest.mark.slow),
        pytest.param("leak", ("leak", 1), marks=pytest.mark.slow),
    ],
)
def test_slow_and_leaking_workers_are_named(tmp_path: Path, fault: str, found: tuple[str, int | None]) -> None:
    arguments = ["--fault", fault, "--rank", "1", "--strength", "2", "--steps", "1000" if fault == "leak" else "400"]
    code, output, events = run(tmp_path, ["--workers", "2"], arguments)
    assert code == 0, output
    assert verdicts(events) == [found], output


def test_the_ledger_adds_up_to_the_wall_time_through_kills_and_a_killed_supervisor(tmp_path: Path) -> None:
    words = command(tmp_path, ["--workers", "2"], ["--steps", "900", "--epochs", "3", "--step-ms", "10"])
    folder = RunFolder(tmp_path, "a")
    walls = []
    for kill_supervisor_at in (220, None):
        began = time.time()
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            kill_worker_after(folder, 60 if kill_supervisor_at else 700, process)
            if kill_supervisor_at:
                wait_for_step(folder, kill_supervisor_at, process)
                time.sleep(2.5)  # where its time went is written every two seconds
                process.kill()
            output = until_the_end(process)
            walls.append(time.time() - began)
            process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 0, output
    ended = [event for event in folder.read_events() if event["event"] == "ended"]
    assert [event["outcome"] for event in ended] == ["interrupted", "finished"]
    seconds = {entry: sum(event["seconds"][entry] for event in ended) for entry in ended[0]["seconds"]}
    assert set(seconds) == {*PHASES, "recovery"}
    wall = sum(walls)
    # What a supervisor that is killed outright did last, it could not write: two seconds at most.
    assert wall - 2.3 - 0.01 * wall <= sum(seconds.values()) <= 1.01 * wall
    assert sum(ended[-1]["seconds"].values()) == pytest.approx(walls[-1], rel=0.01)
    assert all(seconds[entry] > 0 for entry in ("start", "step", "recovery", "replay", "validation", "checkpoint"))
    assert not (folder.path / "ledger.json").exists()


def until_the_end(process: subprocess.Popen[str]) -> str:
    """What it prints until it says that it has finished, or is gone: how long Python takes to go is not a run's."""
    lines = []
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
        if line.startswith("keepstep: finished"):
            break
    return "".join(lines)


def wait_for_step(folder: RunFolder, step: int, process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + 60
    while not (folder.metrics.exists() and f'"step": {step},' in folder.metrics.read_text()):
        assert time.monotonic() < until and process.poll() is None, process.communicate()[0]
        time.sleep(0.05)


def kill_worker_after(folder: RunFolder, step: int, process: subprocess.Popen[str]) -> None:
    import psutil

    wait_for_step(folder, step, process)
    ranks = [child for child in psutil.Process(process.pid).children() if child.environ().get("RANK") == "1"]
    (worker,) = [child for child in ranks if "keepstep.standby" not in child.cmdline()[-1]]
    worker.kill()


def test_show_tells_a_live_runs_time(tmp_path: Path) -> None:
    words = command(tmp_path, ["--workers", "1"], ["--steps", "2000", "--step-ms", "10"])
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 60
        while not (tmp_path / "a" / "ledger.json").exists() or _trained(tmp_path) < 1.0:
            assert time.monotonic() < until
            time.sleep(0.1)
        show = [sys.executable, "-m", "keepstep.cli", "show", "a", "--storage", str(tmp_path)]
        shown = subprocess.run(show, capture_output=True, text=True, check=True).stdout
    finally:
        process.kill()
        process.wait()
    assert "running" in shown and "where the time went" in shown and "training" in shown


def _trained(storage: Path) -> float:
    return float(json.loads((storage / "a" / "ledger.json").read_text())["seconds"]["step"])
