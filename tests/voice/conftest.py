"""The voice recipe's modules by their bare names, as its scripts import them, and a tiny model for every stage."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

RECIPE = Path(__file__).parents[2] / "recipes" / "qwen3_tts"
sys.path.insert(0, str(RECIPE))
# `make voice` runs these in an environment of their own.
collect_ignore_glob = ["test_*.py"] if importlib.util.find_spec("qwen_tts") is None else []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            # What these packages' own imports and calls warn of is not this project's to mend.
            for package in ("qwen_tts", "transformers", "librosa", "resemblyzer", "peft", "gradio", "torch", "pydub"):
                item.add_marker(pytest.mark.filterwarnings(rf"ignore:::{package}(\..*)?"))
            item.add_marker(pytest.mark.filterwarnings("ignore::DeprecationWarning"))


@pytest.fixture(scope="session")
def speech() -> Path:
    """Real speech with transcripts: <speaker folder>/<id>.flac and metadata.csv."""
    folder = Path(os.environ.get("KEEPSTEP_DATA", "")) / "speech"
    if "KEEPSTEP_DATA" not in os.environ or not (folder / "metadata.csv").is_file():
        pytest.skip("KEEPSTEP_DATA names no folder with speech")
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model with random weights, made in seconds."""
    pytest.importorskip("transformers", reason="needs keepstep[voice]")
    from qwen import import_qwen_tts

    import_qwen_tts()
    from tiny import build_tiny

    return build_tiny(tmp_path_factory.mktemp("tiny") / "base")
