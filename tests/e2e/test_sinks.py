"""Sinks of real runs: a worker and then the supervisor are killed, and each sink has one run with each step once."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from e2e.conftest import Shell
from keepstep.folder import RunFolder

SCRIPT = """
import os, sys, time, torch, keepstep
from pathlib import Path
from torch.utils.data import DataLoader, TensorDataset
run = keepstep.start()
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.Adam(model.parameters())
train = DataLoader(TensorDataset(torch.randn(160, 4), torch.randn(160, 2)), batch_size=4, shuffle=True)
model, optimizer, train = run.prepare(model, optimizer, train)
for epoch in run.epochs(3):
    for x, y in run.steps(train):
        loss = ((model(x) - y) ** 2).mean()
        loss.backward()
        optimizer.step(); optimizer.zero_grad()
        run.log(loss=loss)
        time.sleep(float(sys.argv[1]))
        for step in sys.argv[2:]:
            mark = Path(f"killed-{step}")
            if run.step == int(step) and run.rank == run.world_size - 1 and not mark.exists():
                mark.touch(); os.kill(os.getpid(), 9)
    run.log(accuracy=epoch / 2)
"""
STEPS = list(range(1, 121))
ALL = "tensorboard,mlflow,wandb"


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("WANDB_MODE", "offline")


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "keepstep", "run", "--name", "a", "--checkpoint-every", "10", *words]


def until(condition: Callable[[], bool], process: subprocess.Popen[Any], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, "it has ended"
        assert time.monotonic() < deadline
        time.sleep(0.02)


def reached(folder: Path) -> dict[str, int]:
    try:
        return {name: entry["reached"].get("loss", 0) for name, entry in json.loads(_read(folder)).items()}
    except FileNotFoundError:
        return {}


def _read(folder: Path) -> str:
    return (folder / "sinks.json").read_text()


def tensorboard_steps(folder: Path, metric: str) -> list[int]:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    files = sorted((folder / "tensorboard").iterdir())
    events = [event for file in files for event in EventFileLoader(str(file)).Load()]
    return [event.step for event in events for value in event.summary.value if value.tag == metric]


def mlflow_run(tmp_path: Path) -> tuple[Any, Any]:
    from mlflow import MlflowClient

    client = MlflowClient((tmp_path / "mlruns").as_uri())
    (experiment,) = client.search_experiments(filter_string="name = 'keepstep'")
    (run,) = client.search_runs([experiment.experiment_id])
    return client, run


def mlflow_steps(tmp_path: Path, metric: str) -> list[int]:
    client, run = mlflow_run(tmp_path)
    return sorted(found.step for found in client.get_metric_history(run.info.run_id, metric))


def wandb_steps(folder: Path, metric: str) -> list[int]:
    from keepstep.observe.sinks.to_wandb import _history

    files = sorted((folder / "wandb").glob("offline-run-*/*.wandb"))
    assert len({file.name for file in files}) == 1  # the id
    return [step for file in files for step, names in _history(file) if metric in names]


def check_each_step_once(tmp_path: Path, metric: str, steps: list[int]) -> None:
    folder = tmp_path / "runs" / "a"
    assert tensorboard_steps(folder, metric) == steps
    assert mlflow_steps(tmp_path, metric) == steps
    assert wandb_steps(folder, metric) == steps


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def scrape(port: int) -> str:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            return str(answer.read().decode())
    except OSError:
        return ""


@pytest.mark.parametrize("workers", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_worker_and_killed_supervisor_leave_one_run_with_each_step_once(tmp_path: Path, workers: int) -> None:
    folder, port = tmp_path / "runs" / "a", free_port()
    words = command("--workers", str(workers), "--sinks", f"{ALL},prometheus:{port}", "train.py", "0.05")
    words += ["25"] if workers == 2 else []
    with (tmp_path / "said.txt").open("w") as said:
        process = subprocess.Popen(words, cwd=tmp_path, stdout=said, stderr=said)
        until(lambda: len(reached(folder)) == 4 and min(reached(folder)[name] for name in ALL.split(",")) > 34, process)
        found = scrape(port)
        assert 'keepstep_metric{name="loss",run="a"}' in found and 'keepstep_step{run="a"}' in found
        assert f'keepstep_failures_total{{run="a"}} {workers - 1}.0' in found
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert mlflow_run(tmp_path)[1].info.status == "RUNNING"
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "goes on from step" in done.stderr and "delivered" not in done.stderr
    check_each_step_once(tmp_path, "loss", STEPS)
    check_each_step_once(tmp_path, "accuracy", [40, 80, 120])
    _, run = mlflow_run(tmp_path)
    assert run.info.status == "FINISHED"
    assert run.data.params["keepstep.workers"] == str(workers) and run.data.params["script"] == "train.py"
    assert run.data.tags.get("keepstep.failures") == ("1" if workers == 2 else None)
    problems = [event for event in RunFolder(tmp_path / "runs", "a").read_events() if event["event"] == "sink_problem"]
    assert problems == []


def test_python_train_py_feeds_them_too(shell: Shell, tmp_path: Path) -> None:
    script = SCRIPT.replace("keepstep.start()", f'keepstep.start(name="a", sinks="{ALL}", checkpoint_every="10")')
    (tmp_path / "train.py").write_text(script.replace("1 / 0", ""))
    failing = script.replace("run.log(accuracy", "epoch == 1 and 1 / 0\n    run.log(accuracy")
    (tmp_path / "failing.py").write_text(failing)
    assert shell("python", "failing.py", "0").returncode == 1
    assert mlflow_run(tmp_path)[1].info.status == "FAILED"
    done = shell("python", "train.py", "0")
    assert done.returncode == 0, done.stderr
    assert mlflow_run(tmp_path)[1].info.status == "FINISHED"
    check_each_step_once(tmp_path, "loss", STEPS)


def test_sinks_of_the_scripts_own_choice_are_the_supervisors(shell: Shell, tmp_path: Path) -> None:
    """Workers import nothing of them."""
    script = SCRIPT.replace("keepstep.start()", 'keepstep.start(sinks="tensorboard")')
    (tmp_path / "train.py").write_text(script + "\nassert 'tensorboard' not in sys.modules\n")
    done = shell("keepstep", "run", "--workers", "2", "--name", "a", "train.py", "0")
    assert done.returncode == 0, done.stderr
    assert tensorboard_steps(tmp_path / "runs" / "a", "loss") == STEPS


@pytest.mark.slow
def test_a_stopped_run_goes_on_in_the_same_place(tmp_path: Path) -> None:
    words = command("--workers", "2", "--sinks", "mlflow", "train.py", "0.05")
    process = subprocess.Popen(words, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    until(lambda: reached(tmp_path / "runs" / "a").get("mlflow", 0) > 5, process)
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 75
    assert mlflow_run(tmp_path)[1].info.status == "KILLED"
    assert subprocess.run(words, cwd=tmp_path, capture_output=True, timeout=120).returncode == 0
    assert mlflow_run(tmp_path)[1].info.status == "FINISHED"
    assert mlflow_steps(tmp_path, "loss") == STEPS


@pytest.mark.parametrize("workers", ["2", pytest.param("1", marks=pytest.mark.slow)])
def test_a_server_that_is_not_there_is_said_once_and_does_not_slow_the_run(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: str
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        words = command("--workers", workers, "--sinks", f"mlflow,prometheus:{port}", "train.py", "0")
        done = shell("python", *words[1:])
    assert done.returncode == 0, done.stderr
    mlflow = [line for line in done.stderr.splitlines() if line.startswith("keepstep: mlflow: ")]
    prometheus = [line for line in done.stderr.splitlines() if line.startswith("keepstep: prometheus: ")]
    assert len(mlflow) == len(prometheus) == 2, done.stderr
    assert "the run goes on without it" in mlflow[0] and f"port {port}" in prometheus[0]
    assert mlflow[1] == ("keepstep: mlflow: 123 line(s) of metrics were not delivered; they are in metrics.jsonl")
    events = RunFolder(tmp_path / "runs", "a").read_events()
    assert sorted(event["sink"] for event in events if event["event"] == "sink_problem") == [
        "mlflow", "mlflow", "prometheus", "prometheus",
    ]  # fmt: skip
    assert RunFolder(tmp_path / "runs", "a").finished
