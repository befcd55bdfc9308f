"""The recipes on real data, for a few steps; $KEEPSTEP_DATA says where the data sets are."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from e2e.conftest import Shell
from keepstep.folder import RunFolder

DATA = Path(os.environ.get("KEEPSTEP_DATA", "nowhere"))
RECIPES = Path(__file__).parents[2] / "recipes"

needs_cifar10 = pytest.mark.skipif(
    not (DATA / "cifar10").is_dir(), reason="needs CIFAR-10: set KEEPSTEP_DATA to a folder with cifar10/"
)
needs_mnist = pytest.mark.skipif(
    not (DATA / "mnist").is_dir(), reason="needs MNIST: set KEEPSTEP_DATA to a folder with mnist/"
)


def recipe(tmp_path: Path, name: str) -> str:
    shutil.copytree(RECIPES / name, tmp_path / name)
    return f"{name}/train.py"


@needs_cifar10
def test_vit_on_cifar10(shell: Shell, tmp_path: Path) -> None:
    train = recipe(tmp_path, "vit_cifar10")
    small = ["--layers", "2", "--hidden", "64", "--heads", "4", "--mlp", "128", "--batch-size", "64", "--limit", "2000"]
    small += ["--epochs", "3", "--augment", "--data", str(DATA)]
    done = shell("keepstep", "run", "--workers", "2", "--strategy", "fsdp2", "--name", "vit", train, *small)
    assert done.returncode == 0, done.stderr
    metrics = RunFolder(tmp_path / "runs", "vit").read_metrics()
    losses = [line["loss"] for line in metrics if "loss" in line]
    assert len(losses) == 96
    assert sum(losses[-10:]) < 0.95 * sum(losses[:10])
    assert metrics[-1]["accuracy"] > 0.2


@needs_mnist
def test_resnet_on_mnist(shell: Shell, tmp_path: Path) -> None:
    train = recipe(tmp_path, "resnet_mnist")
    small = ["--width", "8", "--limit", "6000", "--epochs", "2", "--batch-size", "64", "--data", str(DATA)]
    done = shell("keepstep", "run", "--workers", "2", "--name", "resnet", train, *small)
    assert done.returncode == 0, done.stderr
    assert RunFolder(tmp_path / "runs", "resnet").read_metrics()[-1]["accuracy"] > 0.85
