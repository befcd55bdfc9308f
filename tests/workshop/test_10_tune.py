"""Lesson 10: the grid's accuracies are the same in raw Ray Tune and in keepstep; ASHA stops who is worse."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from workshop.conftest import pictures, text

WORKSHOP = Path(__file__).parents[2] / "workshop"
LESSON = "10-tune"

Runner = Callable[..., subprocess.CompletedProcess[str]]


def load(path: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A file of the lesson as a module."""
    monkeypatch.syspath_prepend(str(WORKSHOP))
    from common.checks import load as load_file

    return load_file(WORKSHOP / LESSON / path)


def read(folder: Path) -> dict[str, Any]:
    return {trial["values"]["lr"]: trial for trial in json.loads((folder / "tune.json").read_text())["trials"]}


@pytest.mark.ray
def test_both_find_the_same_and_asha_stops_the_worse(run_lesson: Runner, tmp_path: Path, ray_address: str) -> None:
    common = ["--epochs", 2, "--limit", 512, "--batch-size", 32]  # 16 steps an epoch: a good rate shows after one
    env = {"RAY_ADDRESS": ray_address, "RAY_AUTH_MODE": "disabled"}
    # One trial at a time: whom ASHA stops is then no matter of who came first.
    raw = run_lesson(LESSON, "tune_ray.py", "--method", "asha", "--lrs", "1e-2,1e-6", *common, "--cpus-per-worker", 8,
                     "--output", tmp_path, **env)  # fmt: skip
    assert raw.returncode == 0, raw.stderr
    assert "best: lr 0.01" in raw.stdout
    trials = read(tmp_path / "ray-asha")
    assert [(lr, trial["status"], trial["step"]) for lr, trial in trials.items()] == [
        (0.01, "finished", 32), (1e-6, "stopped early", 16)]  # fmt: skip
    assert (Path(trials[0.01]["checkpoint"]) / "model.pt").is_file()

    words = ["-m", "keepstep", "tune", "--name", "grid", "--storage", tmp_path, "--device", "cpu", "--method", "grid"]
    words += ["--metric", "accuracy:max", "--space", "lr=grid(1e-2,1e-6)", "train_keepstep.py", *common]
    ours = run_lesson(LESSON, *words, "--order", "torch", **env)
    assert ours.returncode == 0, ours.stderr
    compared = run_lesson(LESSON, "compare.py", tmp_path / "grid", tmp_path / "ray-asha")
    assert compared.returncode == 0, compared.stdout
    saved = [line.split()[-2:] for line in compared.stdout.splitlines()[1:3]]
    assert saved == [["64", "0%"], ["48", "25%"]]

    changed = json.loads((tmp_path / "ray-asha" / "tune.json").read_text())
    changed["trials"][1]["reports"][0] += 0.01
    (tmp_path / "ray-asha" / "tune.json").write_text(json.dumps(changed))
    compared = run_lesson(LESSON, "compare.py", tmp_path / "grid", tmp_path / "ray-asha")
    assert compared.returncode == 1
    assert "differs: lr 1e-06, epoch 0" in compared.stdout


@pytest.mark.ray
@pytest.mark.slow
def test_trials_of_two_workers(run_lesson: Runner, tmp_path: Path, ray_address: str) -> None:
    common = ["--epochs", 1, "--limit", 256]
    env = {"RAY_ADDRESS": ray_address, "RAY_AUTH_MODE": "disabled"}
    raw = run_lesson(
        LESSON, "tune_ray.py", "--num-workers", 2, "--lrs", "1e-2,1e-3", *common, "--output", tmp_path, **env
    )
    assert raw.returncode == 0, raw.stderr
    assert (Path(read(tmp_path / "ray-grid")[0.01]["checkpoint"]) / "model.pt").is_file()
    words = ["-m", "keepstep", "tune", "--workers", 2, "--name", "grid", "--storage", tmp_path, "--device", "cpu"]
    words += ["--method", "grid", "--metric", "accuracy:max", "--space", "lr=grid(1e-2,1e-3)", "train_keepstep.py"]
    ours = run_lesson(LESSON, *words, *common, "--order", "torch", **env)
    assert ours.returncode == 0, ours.stderr
    compared = run_lesson(LESSON, "compare.py", tmp_path / "ray-grid", tmp_path / "grid")
    assert compared.returncode == 0, compared.stdout


@pytest.mark.ray
def test_the_notebook(run_notebook: Callable[..., Any], ray_address: str) -> None:
    # 16 steps an epoch: after fewer the worse rate may lead, and the better be stopped, some steps after its report.
    env = {"WORKSHOP_EPOCHS": "2", "WORKSHOP_LIMIT": "2048", "WORKSHOP_LRS": "1e-2,1e-5"}
    made = run_notebook(LESSON, "Tune.ipynb", RAY_ADDRESS=ray_address, RAY_AUTH_MODE="disabled", **env)
    assert [len(picture) > 10_000 for picture in pictures(made)] == [True]
    assert "same accuracies at every epoch that both have: True" in text(made)
    assert "loaded weights give the accuracy that was reported: True" in text(made)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--lrs", "fast,slow"], "'fast,slow' is no list of numbers, as 1e-4,1e-3,1e-2"),
        (["--lrs", "1e-3,-1"], "a learning rate is above 0"),
        (["--lrs", "1e-3", "--num-samples", "4"], "give two rates"),
        (["--lr", "1e-3"], "--lr is what is searched for: give --lrs"),
        (["--num-workers", "3"], "--batch-size 128 does not divide over 3 workers"),
        (["--use-gpu", "True"], "torch sees no GPU here"),
    ],
)
def test_bad_words_say_what_to_do(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = load("tune_ray.py", monkeypatch)
    monkeypatch.setattr(script.arguments.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        script.parse(words)
    assert said in capsys.readouterr().err


def test_a_search_that_is_not_there(run_lesson: Runner, tmp_path: Path) -> None:
    done = run_lesson(LESSON, "compare.py", tmp_path / "nothing")
    assert done.returncode != 0
    assert "search first, with tune_ray.py or keepstep tune" in done.stderr


def test_typical_wrong_answers_are_told_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = load("exercises/checks.py", monkeypatch)
    wrong = sys.modules["common.checks"].Wrong
    rates = [10 ** (-5 + 4 * k / 3999) for k in range(4000)]
    with pytest.raises(wrong, match="another seed gave the same"):
        checks.check_1(SimpleNamespace(draw=lambda low, high, num, seed: rates))

    def puts_nan_last_among_losses(values: dict[str, float], keep: int, mode: str) -> set[str]:
        ranked = sorted(values, key=lambda name: -values[name] if mode == "max" else values[name])
        return set(ranked[: -(-len(ranked) // keep)])

    with pytest.raises(wrong, match="nan"):
        checks.check_2(SimpleNamespace(survivors=puts_nan_last_among_losses))
    with pytest.raises(wrong, match="from rung to rung"):  # each rung counted from the start
        checks.check_3(SimpleNamespace(num_epochs=lambda trials, epochs, keep: trials * epochs // keep))
