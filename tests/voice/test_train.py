"""Training a voice as a person would: on one worker and on two, killed and resumed, exported and spoken with."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from export import export_voice
from qwen import load_voice_model, wants_whole_text
from safetensors.torch import load_file
from voice.conftest import RECIPE

pytestmark = pytest.mark.timeout(600)
STEPS = ("--num-epochs", "2", "--batch-frames", "160", "--learning-rate", "1e-3", "--validation-share", "0.1")


def keepstep(command: str, options: tuple[str, ...], *script: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "keepstep", command, *options, str(RECIPE / "train.py"), *script]
    return subprocess.run(words, capture_output=True, text=True, timeout=500)


@pytest.fixture(scope="module")
def script(tiny_model: Path, codes_file: Path) -> tuple[str, ...]:
    return ("--codes", str(codes_file), "--model-path", str(tiny_model), "--i-have-consent", *STEPS)


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def one_worker(storage: Path, script: tuple[str, ...]) -> list[dict[str, Any]]:
    return trained(storage, "one", (), *script)


def trained(storage: Path, name: str, options: tuple[str, ...], *script: str) -> list[dict[str, Any]]:
    done = keepstep("run", ("--name", name, "--storage", str(storage), *options), *script)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in (storage / name / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("options", "more"),
    [
        (("--workers", "2"), ()),
        (("--workers", "2", "--strategy", "fsdp2"), ()),
        (("--workers", "2"), ("--accumulate", "2")),
    ],
    ids=["ddp", "fsdp2", "accumulated"],
)
def test_two_workers_make_the_steps_of_one(
    storage: Path,
    script: tuple[str, ...],
    one_worker: list[dict[str, Any]],
    options: tuple[str, ...],
    more: tuple[str, ...],
    request: pytest.FixtureRequest,
) -> None:
    """Same batches, same losses, same gradients, though utterances differ in length and the last batch is uneven."""
    together = trained(storage, request.node.callspec.id, options, *script, *more)
    assert len(together) == len(one_worker) > 10
    for left, right in zip(one_worker, together, strict=True):
        names = left.keys() & {"loss", "gradient_norm", "validation_loss"}
        assert names
        for name in names:
            assert left[name] == pytest.approx(right[name], rel=2e-4), (name, left, right)


def test_a_killed_run_ends_with_the_same_weights(tmp_path: Path, script: tuple[str, ...]) -> None:
    """`keepstep verify` kills workers and compares every step, sample and weight bit for bit."""
    options = (
        "--workers",
        "2",
        "--kills",
        "1",
        "--faults-seed",
        "1",
        "--storage",
        str(tmp_path),
        "--checkpoint-every",
        "3",
    )
    done = keepstep("verify", options, *script, "--ema-decay", "0.9", "--lora-rank", "2")
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_exported_voice_speaks(storage: Path, one_worker: list[dict[str, Any]], tmp_path: Path) -> None:
    folder = export_voice(storage / "one", tmp_path / "voice", dtype="fp32")
    voice = load_voice_model(str(folder))
    assert voice.get_supported_speakers() == ["anna", "bert"]
    assert wants_whole_text(voice)
    saved = load_file(storage / "one" / "artifacts" / "voice.safetensors")
    loaded = voice.model.state_dict()
    assert saved.keys() == loaded.keys()
    assert all(torch.equal(loaded[name], saved[name]) for name in saved)
    wavs, rate = voice.generate_custom_voice("Hello.", speaker="Bert", max_new_tokens=12)
    assert rate == 24_000 and 0 < len(wavs[0]) <= 12 * 1920
    card = (folder / "README.md").read_text()
    best = min(line["validation_loss"] for line in one_worker if "validation_loss" in line)
    assert "24 utterances" in card and f"{best:.4g}" in card and "Consent was stated" in card
    assert json.loads((folder / "consent.json").read_text())["speakers"] == ["anna", "bert"]
    with pytest.raises(ValueError, match="is there already"):
        export_voice(storage / "one", folder)


def test_lora_and_an_average_are_exported_as_plain_weights(
    storage: Path, script: tuple[str, ...], tiny_model: Path, tmp_path: Path
) -> None:
    trained(storage, "lora", (), *script, "--lora-rank", "4", "--ema-decay", "0.5", "--speaker", "anna", "--streaming")
    folder = export_voice(storage / "lora", tmp_path / "voice", dtype="fp32")
    before, after = load_file(tiny_model / "model.safetensors"), load_file(folder / "model.safetensors")
    assert after.keys() == {name for name in before if name.startswith("talker.")}
    changed = {name for name in after if not torch.equal(before[name], after[name])}
    projections = {name for name in after if "_proj." in name and ".layers." in name}
    assert changed == projections | {"talker.model.codec_embedding.weight"}  # the speaker's place
    assert "non_streaming_mode=False" in (folder / "README.md").read_text()
    voice = load_voice_model(str(folder))
    assert voice.get_supported_speakers() == ["anna"]
    assert not wants_whole_text(voice)
    assert len(voice.generate_custom_voice("Hello.", speaker="anna", non_streaming_mode=False, max_new_tokens=9)[0][0])


def test_another_base_model_is_refused_at_export(storage: Path, one_worker: list[Any], tmp_path: Path) -> None:
    from tiny import build_tiny

    other = build_tiny(tmp_path / "other", seed=1)
    with pytest.raises(ValueError, match="is not the base model that the run was trained from"):
        export_voice(storage / "one", tmp_path / "voice", str(other))
    with pytest.raises(ValueError, match=r"voice.json is not there: name the folder of a run"):
        export_voice(tmp_path, tmp_path / "voice")


def test_training_stops_when_validation_gets_no_better(storage: Path, script: tuple[str, ...]) -> None:
    lines = trained(storage, "early", (), *script, "--num-epochs", "30", "--patience", "2", "--learning-rate", "0.05")
    losses = [line["validation_loss"] for line in lines if "validation_loss" in line]
    assert 3 <= len(losses) < 30
    assert min(losses[-2:]) >= min(losses[:-2])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--i-have-consent": None}, "say --i-have-consent if anna and bert agreed to it"),
        ({"--batch-frames": "9"}, "frames; give --batch-frames"),
        ({"--speaker": "clara"}, "has no rows of clara"),
        ({"--model-path": "nowhere/at/all"}, "nowhere/at/all is not there"),
        ({"--language": "klingon"}, "language 'klingon' is not one of the model's"),
        ({"--validation-share": "1.5"}, "--validation-share 1.5 must be from 0 to less than 1"),
    ],
)
def test_bad_input_is_one_line(
    script: tuple[str, ...],
    change: dict[str, str | None],
    message: str,
    tmp_path: Path,
) -> None:
    words = [word for word in script if word not in change or change[word] is not None]
    words += [word for name, value in change.items() if value is not None for word in (name, value)]
    done = subprocess.run(
        [sys.executable, str(RECIPE / "train.py"), *words], capture_output=True, text=True, cwd=tmp_path, timeout=200
    )
    assert done.returncode != 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr
