"""Runs commands as a person would, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Shell = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    """`shell("keepstep", "run", ...)` in an empty folder."""

    def call(program: str, *words: str, timeout: float = 200) -> subprocess.CompletedProcess[str]:
        command = [str(Path(sys.executable).with_name(program)), *words]
        return subprocess.run(
            command, capture_output=True, text=True, cwd=tmp_path, timeout=timeout, env=dict(os.environ)
        )

    return call
