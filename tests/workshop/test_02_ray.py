"""Lesson 02: raw Ray Train and Ray Data, and the same in keepstep: the same samples, the same losses."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from workshop.conftest import WORKSHOP, Runner, pictures, text

sys.path.insert(0, str(WORKSHOP))
from common import cluster
from common.checks import Wrong, load
from common.count import count
from common.record import read, read_run

LESSON = "02-ddp-pytorch-ray"
KEEPSTEP = (sys.executable, "-m", "keepstep", "run", "--workers", "2", "--name", "keepstep", "--storage")
RAY = {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2"}  # how often reports are looked for: 2 s otherwise
SETTINGS = ("--epochs", 2, "--limit", 230, "--batch-size", 50)


def same(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> None:
    assert len(one) == len(other) > 0
    for left, right in zip(one, other, strict=True):
        for name in ("train_loss", "test_loss", "accuracy"):
            assert left[name] == pytest.approx(right[name], rel=1e-5), (name, left, right)


@pytest.mark.ray
@pytest.mark.parametrize("task", ["vit", pytest.param("resnet", marks=pytest.mark.slow)])
def test_losses_are_the_same_in_keepstep(run_lesson: Runner, ray_address: str, tmp_path: Path, task: str) -> None:
    """ResNet-18 is slow's only because another start of Ray is: the notebook's test has it too."""
    settings = (*SETTINGS, "--task", task)
    words = ("train_ray_ddp.py", "--num-workers", 2, "--use-gpu", False, "--address", ray_address, *settings)
    raw = run_lesson(LESSON, *words, "--output", tmp_path / "raw", **RAY)
    assert raw.returncode == 0, raw.stderr
    assert "checkpoint: " in raw.stdout
    done = run_lesson(LESSON, "train_keepstep.py", *settings, "--order", "torch", launcher=(*KEEPSTEP, str(tmp_path)))
    assert done.returncode == 0, done.stderr
    same(read(tmp_path / "raw"), read_run(tmp_path / "keepstep", num_samples=230, batch_size=50))


@pytest.mark.slow
@pytest.mark.ray
def test_one_worker_goes_on_where_it_was(run_lesson: Runner, ray_address: str, tmp_path: Path) -> None:
    words = ("train_ray_ddp.py", "--num-workers", 1, "--address", ray_address, "--name", "again", "--output", tmp_path)
    for epochs in (1, 2):
        done = run_lesson(LESSON, *words, "--limit", 128, "--epochs", epochs, **RAY)
        assert done.returncode == 0, done.stderr
    words = ("train_single_machine.py", "--limit", 128, "--epochs", 2, "--output", tmp_path / "whole")
    assert run_lesson("01-ddp-pytorch-only", *words).returncode == 0
    same(read(tmp_path / "whole"), read(tmp_path))


def ids(folder: Path) -> list[list[list[int]]]:
    """Each worker's batches of row numbers."""
    files = [folder / f"ids_rank_{rank}.jsonl" for rank in range(2)]
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


@pytest.mark.ray
def test_ray_data_gives_the_same_rows_and_losses(run_lesson: Runner, ray_address: str, tmp_path: Path) -> None:
    settings = ("--epochs", 2, "--limit", 100, "--batch-size", 50, "--order", "file", "--ids")
    raw = ("train_ray_ddp_with_ray_data.py", "--num-workers", 2, "--address", ray_address)
    done = run_lesson(LESSON, *raw, *settings, "--output", tmp_path / "raw", **RAY)
    assert done.returncode == 0, done.stderr
    launcher = (*KEEPSTEP, str(tmp_path))
    done = run_lesson(LESSON, "train_keepstep_with_ray_data.py", *settings, launcher=launcher, RAY_ADDRESS=ray_address)
    assert done.returncode == 0, done.stderr
    found = ids(tmp_path / "raw")
    assert found == ids(tmp_path / "keepstep")
    assert found[0][0] + found[1][0] == list(range(50))  # in the order of the data set, a block each
    same(read(tmp_path / "raw"), read_run(tmp_path / "keepstep", num_samples=100, batch_size=50))


@pytest.mark.ray
def test_the_notebook(run_notebook: Any, run_lesson: Runner, ray_address: str, tmp_path: Path) -> None:
    notebook = run_notebook(LESSON, "Ray_Train_Intro.ipynb", RAY_ADDRESS=ray_address, **RAY)
    assert len(pictures(notebook)) == 3
    assert all(len(picture) > 5000 for picture in pictures(notebook))
    said = text(notebook)
    predicted, reported = re.search(r"predictions: ([\d.]+); as reported by the training: ([\d.]+)", said).groups()
    assert predicted == reported
    settings = ("--task", "resnet", "--epochs", 1, "--limit", 256, "--order", "torch")
    assert run_lesson(LESSON, "train_keepstep.py", *settings, launcher=(*KEEPSTEP, str(tmp_path))).returncode == 0
    (row,) = read_run(tmp_path / "keepstep", num_samples=256, batch_size=128)
    for name in ("train_loss", "test_loss", "accuracy"):
        shown = float(re.search(rf"'{name}': ([\d.]+)", said)[1])
        assert shown == pytest.approx(row[name], abs=6e-5), name


@pytest.mark.parametrize(
    ("raw", "with_keepstep"),
    [
        ("train_ray_ddp.py", "train_keepstep.py"),
        ("train_ray_ddp_with_ray_data.py", "train_keepstep_with_ray_data.py"),
    ],
)
def test_keepstep_needs_fewer_lines(raw: str, with_keepstep: str) -> None:
    long, short = count(WORKSHOP / LESSON / raw), count(WORKSHOP / LESSON / with_keepstep)
    assert short.total < 0.6 * long.total
    assert short.boilerplate < 0.25 * long.boilerplate


@pytest.mark.ray
def test_more_workers_than_the_ray_has_are_refused(run_lesson: Runner, ray_address: str) -> None:
    refused = run_lesson(LESSON, "train_ray_ddp.py", "--num-workers", 16, "--address", ray_address)
    assert refused.returncode == 1
    assert "16 workers ask for 16 CPUs, this Ray has 8: give --num-workers 8" in refused.stderr


def test_a_refusal_counts_the_cpu_that_reads_data() -> None:
    said = cluster._refusal("CPU", 8, 9.0, 8.0, data_cpus=1)
    assert said.startswith("8 workers, and 1 CPU to read data, ask for 9, this Ray has 8: give --num-workers 7, or ")


def test_bad_input_says_what_to_do(run_lesson: Runner, tmp_path: Path) -> None:
    uneven = run_lesson(LESSON, "train_ray_ddp.py", "--num-workers", 3, "--batch-size", 50)
    assert uneven.returncode == 2
    assert "50 does not divide between 3 workers" in uneven.stderr
    missing = run_lesson(LESSON, "train_ray_ddp.py", "--data", tmp_path)
    assert missing.returncode == 1
    assert "Name the folder that holds them" in missing.stderr


def test_without_ray_it_says_how_to_get_it(run_lesson: Runner, tmp_path: Path) -> None:
    (tmp_path / "ray.py").write_text("raise ImportError('no ray')")

    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    refused = run_lesson(LESSON, "train_ray_ddp.py", PYTHONPATH=path)
    assert refused.returncode == 1
    assert "pip install 'keepstep[ray]'" in refused.stderr


# -- exercises: wrong answers, beside those that learners begin with ---------------------------------------------------


def mean_of_means(loss_sum: float, correct: int, num_images: int, all_reduce: Any) -> dict[str, float]:
    loss, accuracy, workers = all_reduce([loss_sum / num_images, correct / num_images, 1])
    return {"loss": loss / workers, "accuracy": accuracy / workers}


def only_the_first_adds_up(loss_sum: float, correct: int, num_images: int, all_reduce: Any) -> dict[str, float]:
    if num_images == 40:
        loss_sum, correct, num_images = all_reduce([loss_sum, correct, num_images])
    return {"loss": loss_sum / num_images, "accuracy": correct / num_images}


@pytest.mark.parametrize(
    ("metrics", "hint"),
    [(mean_of_means, "a mean of the workers' accuracies is not it"), (only_the_first_adds_up, "all must call it")],
)
def test_wrong_metrics_are_found(metrics: Any, hint: str) -> None:
    checks = load(WORKSHOP / LESSON / "exercises" / "checks.py")
    with pytest.raises(Wrong, match=hint):
        checks.check_2(SimpleNamespace(metrics=metrics))


def test_a_checkpoint_without_the_moments_is_found() -> None:
    checks = load(WORKSHOP / LESSON / "exercises" / "checks.py")
    answer = load(WORKSHOP / LESSON / "exercises" / "solutions" / "1_checkpoint.py")
    right = answer.load
    answer.load = lambda folder, model, optimizer: right(folder, model, torch.optim.Adam(model.parameters()))
    with pytest.raises(Wrong, match="does the optimizer know its moments"):
        checks.check_1(answer)
