"""Runs lessons as a learner would: from their own folder, at small settings."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

WORKSHOP = Path(__file__).parents[2] / "workshop"
SMALL = {"WORKSHOP_LIMIT": "256", "WORKSHOP_EPOCHS": "1"}

Runner = Callable[..., subprocess.CompletedProcess[str]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A lesson's training on a busy machine takes its time."""
    for item in items:
        if item.path.parent == Path(__file__).parent and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="session")
def data() -> str:
    """The folder of real data; the lessons have no other."""
    folder = os.environ.get("KEEPSTEP_DATA")
    if folder is None:
        pytest.skip("KEEPSTEP_DATA names no folder with CIFAR-10 and MNIST")
    return folder


@pytest.fixture(scope="session")
def run_lesson(data: str) -> Runner:
    """`run_lesson("01-ddp-pytorch-only", "train_ddp.py", "--epochs", 1)`, in the lesson's folder."""

    def run(lesson: str, *words: Any, launcher: tuple[str, ...] = (sys.executable,), timeout: float = 400, **env: str):
        command = [*launcher, *map(str, words)]
        environment = os.environ | {"KEEPSTEP_DATA": data} | SMALL | env
        return subprocess.run(
            command, cwd=WORKSHOP / lesson, env=environment, capture_output=True, text=True, timeout=timeout
        )

    return run


@pytest.fixture
def run_notebook(data: str, tmp_path: Path) -> Callable[..., Any]:
    """Executes a copy of a notebook at small settings, beside the lesson's own files, and returns it."""
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")

    def run(lesson: str, notebook: str, timeout: int = 400, **env: str) -> Any:
        for name in ("common", lesson):
            shutil.copytree(WORKSHOP / name, tmp_path / name, dirs_exist_ok=True)
        path = tmp_path / lesson / notebook
        made = nbformat.read(path, as_version=4)
        with pytest.MonkeyPatch.context() as patch:
            for name, value in ({"KEEPSTEP_DATA": data} | SMALL | env).items():
                patch.setenv(name, value)
            client = nbclient.NotebookClient(made, timeout=timeout, resources={"metadata": {"path": str(path.parent)}})
            client.execute()
        return made

    return run


def pictures(notebook: Any) -> list[bytes]:
    """The PNGs of a notebook's outputs."""
    import base64

    return [
        base64.b64decode(output["data"]["image/png"])
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if "image/png" in output.get("data", {})
    ]


def text(notebook: Any) -> str:
    """All that a notebook's cells printed or showed as text."""
    parts = []
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            parts.append(output.get("text", "") or output.get("data", {}).get("text/plain", ""))
    return "\n".join(parts)
