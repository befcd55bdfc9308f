"""Searches as a person would start them: killed, resumed, stopped; trials that are stopped, copied, or fail."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from e2e.conftest import Shell
from e2e.test_recipes import DATA, needs_mnist, recipe
from keepstep.folder import RunFolder

pytest.importorskip("ray")

_SCRIPT = Path(__file__).with_name("tune_train.py")
_STEPS = 24


class Search:
    """`keepstep tune` in a folder of its own, on the tests' Ray."""

    def __init__(self, storage: Path, address: str, *words: str) -> None:
        self.storage = storage
        flags = ["--address", address, "--storage", str(storage), "--name", "find", "--device", "cpu"]
        self._words = [sys.executable, "-m", "keepstep", "tune", *flags, "--metric", "error:min", *words]

    def start(self, *script: str, resume: bool = False) -> subprocess.Popen[str]:
        words = [*self._words, *(["--resume"] if resume else []), str(_SCRIPT), *script]
        return subprocess.Popen(
            words, cwd=self.storage, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=dict(os.environ)
        )

    def finish(self, process: subprocess.Popen[str], code: int = 0) -> str:
        output, _ = process.communicate(timeout=150)
        assert process.returncode == code, output
        return output

    def run(self, number: int) -> RunFolder:
        return RunFolder(self.storage, f"find-{number:04d}")

    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.storage / "find" / "tune.json").read_text())
        return found

    def trials(self) -> dict[str, Any]:
        return {trial["run"]: trial for trial in self.summary()["trials"]}

    def losses(self, number: int) -> list[tuple[int, float]]:
        return [(line["step"], line["loss"]) for line in self.run(number).read_metrics() if "loss" in line]

    def events(self, number: int, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.run(number).read_events() if event["event"] == kind]


def wait_until(condition: Callable[[], Any], process: subprocess.Popen[str], timeout_s: float = 90) -> None:
    until = time.monotonic() + timeout_s
    while not condition():
        if process.poll() is not None or time.monotonic() > until:
            process.kill()
            pytest.fail(f"it did not come to that: {process.communicate()[0]}")
        time.sleep(0.05)


@pytest.mark.ray
def test_a_search_that_was_killed_goes_on_and_a_bad_trial_is_stopped_early(tmp_path: Path, ray_address: str) -> None:
    """One trial at a time, the best first: the second is worse at its first report, and is stopped there."""
    flags = ["--space", "lr=grid(0.1,0.00001)", "--cpus-per-worker", "8", "--checkpoint-every", "2"]
    search = Search(tmp_path, ray_address, *flags)
    script = ["--pause", "0.1"]
    killed = search.start(*script)
    wait_until(lambda: len(search.losses(0)) >= 6, killed)
    killed.kill()
    killed.communicate()

    output = search.finish(search.start(*script, resume=True))
    trials = search.trials()
    assert (trials["find-0000"]["status"], trials["find-0000"]["step"]) == ("finished", _STEPS)
    assert trials["find-0001"]["status"] == "stopped early" and trials["find-0001"]["step"] < _STEPS
    assert search.events(0, "resumed") and len(search.events(0, "started")) == 1
    assert [step for step, _ in search.losses(0)] == list(range(1, _STEPS + 1))
    assert search.run(1).read_result()["status"] == "stopped", "it was asked to save and stop"
    assert search.summary()["best"] == "find-0000" and "--lr 0.1" in search.summary()["best_command"]
    assert "keepstep run --name find-best" in output and "Traceback" not in output
    assert [step for step, _ in trials["find-0000"]["reports"]] == [4, 8, 12, 16, 20, 24], "each once"

    again = search.finish(search.start(*script, resume=True))
    assert "trials to run" not in again and "finished" in again


@pytest.mark.ray
@pytest.mark.slow
def test_a_loser_goes_on_from_the_donors_weights_bit_for_bit(tmp_path: Path, ray_address: str) -> None:
    """The donor waits until it was copied; then both make a few steps, and Ctrl-C saves them."""
    flags = ["--method", "pbt", "--grace", "5", "--checkpoint-every", "4", "--checkpoint-mode", "sync", "--seed", "4"]
    search = Search(tmp_path, ray_address, *flags, "--trials", "2", "--space", "lr=loguniform(1e-5,1e-1)")
    file = tmp_path / "go-on"
    process = search.start("--pause", "0.2", "--epochs", "100", "--hold", str(file))
    wait_until(lambda: search.events(1, "copied"), process)
    file.touch()
    copied = search.events(1, "copied")[0]
    step = copied["step"]
    wait_until(lambda: all(max(search.losses(number))[0] >= step + 2 for number in (0, 1)), process)
    process.send_signal(signal.SIGINT)
    search.finish(process, code=75)
    donors, losers = dict(search.losses(0)), dict(search.losses(1))
    assert copied["donor"] == "find-0000" and copied["carried"] == ["lr"] and step == 20
    assert [losers[s] for s in range(1, step + 2)] == [donors[s] for s in range(1, step + 2)]
    assert losers[step + 2] != donors[step + 2], "the rate is another"
    assert search.trials()["find-0001"]["values"] == copied["values"] == {"lr": 0.008728}
    assert {search.run(number).read_result()["status"] for number in (0, 1)} == {"stopped"}


@pytest.mark.ray
@pytest.mark.slow
def test_ctrl_c_saves_all_trials_and_a_trial_that_fails_is_a_row(tmp_path: Path, ray_address: str) -> None:
    flags = ["--method", "grid", "--space", "broken=grid(false,true)", "--max-failures", "1"]
    search = Search(tmp_path, ray_address, *flags)
    script = ["--pause", "0.2"]
    stopped = search.start(*script)
    wait_until(lambda: len(search.losses(0)) >= 2 and search.trials()["find-0001"], stopped)
    stopped.send_signal(signal.SIGINT)
    output = search.finish(stopped, code=75)
    assert "--resume goes on" in output
    saved = search.run(0).read_result()
    assert saved["status"] == "stopped" and search.run(0).store_to_read().steps() == [saved["step"]]

    output = search.finish(search.start(*script, resume=True))
    trials = search.trials()
    assert trials["find-0000"]["status"] == "finished" and search.events(0, "resumed")[0]["step"] == saved["step"]
    assert trials["find-0001"]["status"] == "failed" and "broken as asked" in trials["find-0001"]["reason"]
    assert [step for step, _ in search.losses(0)] == list(range(1, _STEPS + 1))
    refused = search.start(*script)
    assert "is there already" in search.finish(refused, code=2)


@pytest.mark.ray
@pytest.mark.slow
def test_a_trial_whose_process_is_lost_goes_on_elsewhere(tmp_path: Path, ray_address: str) -> None:
    search = Search(tmp_path, ray_address, "--space", "lr=grid(0.1)", "--checkpoint-every", "2")
    process = search.start("--pause", "0.2")
    wait_until(lambda: len(search.losses(0)) >= 9, process)
    holder = search.run(0).path / ".lock"
    run = int(holder.read_text().split()[1])
    trial = int(Path(f"/proc/{run}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(trial, signal.SIGKILL)
    search.finish(process)
    assert search.trials()["find-0000"]["status"] == "finished" and search.events(0, "resumed")
    assert [step for step, _ in search.trials()["find-0000"]["reports"]] == [4, 8, 12, 16, 20, 24], "each once"
    assert [step for step, _ in search.losses(0)] == list(range(1, _STEPS + 1))


@pytest.mark.ray
@pytest.mark.slow
def test_a_population_that_was_killed_goes_on(tmp_path: Path, ray_address: str) -> None:
    flags = ["--method", "pbt", "--grace", "5", "--checkpoint-every", "4", "--checkpoint-mode", "sync", "--seed", "4"]
    search = Search(tmp_path, ray_address, *flags, "--trials", "2", "--space", "lr=loguniform(1e-5,1e-1)")
    file = tmp_path / "go-on"
    script = ["--pause", "0.1", "--epochs", "24", "--hold", str(file)]
    killed = search.start(*script)
    journal = tmp_path / "find" / "results.jsonl"
    wait_until(lambda: journal.exists() and '"copy"' in journal.read_text(), killed)
    killed.kill()  # the copy is decided on, and not made yet
    killed.communicate()
    assert not search.events(1, "copied")
    file.touch()
    search.finish(search.start(*script, resume=True))
    copied = search.events(1, "copied")
    assert (copied[0]["order"], copied[0]["donor"], copied[0]["values"]) == (1, "find-0000", {"lr": 0.008728})
    orders = [event["order"] for number in (0, 1) for event in search.events(number, "copied")]
    assert len(orders) == len(set(orders)), "none was made twice"
    assert {trial["status"] for trial in search.trials().values()} == {"finished"}
    assert [step for step, _ in search.losses(1)] == list(range(1, 97))


@needs_mnist
@pytest.mark.ray
@pytest.mark.slow
def test_resnet_on_mnist_with_two_workers_a_trial(tmp_path: Path, shell: Shell) -> None:
    """On a Ray of its own, with one plausible rate among three."""
    train = recipe(tmp_path, "resnet_mnist")
    flags = ["--name", "find", "--workers", "2", "--cpus-per-worker", "0.5", "--device", "cpu"]
    flags += ["--metric", "accuracy:max", "--space", "lr=grid(0.01,0.00001,1)"]
    small = ["--width", "8", "--limit", "1000", "--epochs", "3", "--batch-size", "32", "--data", str(DATA)]
    done = shell("keepstep", "tune", *flags, train, *small, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    best, *others = json.loads((tmp_path / "runs" / "find" / "tune.json").read_text())["trials"]
    assert best["run"] == "find-0000" and best["status"] == "finished" and best["accuracy"] > 0.6
    assert {other["status"] for other in others} <= {"finished", "stopped early"} and len(others) == 2
    assert "find-0000" in shell("keepstep", "runs").stdout
