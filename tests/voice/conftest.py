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


@pytest.fixture(scope="session")
def codes_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 utterances of two speakers, anna and Bert, with codes for the tiny model: noise, but whole."""
    import numpy as np
    from audio import write_wav
    from rows import write_rows

    folder = tmp_path_factory.mktemp("codes")
    drawn = np.random.default_rng(0)
    rows = []
    for number in range(24):
        num_frames = int(drawn.integers(8, 40))
        path = folder / f"{number:02d}.wav"
        write_wav(path, drawn.normal(0, 0.1, num_frames * 1920).astype(np.float32))
        rows.append(
            {
                "audio": str(path),
                "text": f"Sentence number {number} of these.",
                "speaker": ("anna", "Bert")[number % 2],
                "audio_codes": drawn.integers(0, 64, (num_frames, 16)).tolist(),
            }
        )
    write_rows(folder / "codes.jsonl", rows)
    return folder / "codes.jsonl"
