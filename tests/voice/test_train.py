"""Training a voice as a person would: on one worker and on two, killed and resumed, exported and spoken with."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from export import export_voice
from qwen import load_voice_model, trained_language, wants_whole_text
from rows import read_rows, write_rows
from safetensors.torch import load_file
from train import update_average
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
        (("--workers", "2", "--strategy", "fsdp"), ()),
        (("--workers", "2", "--strategy", "fsdp2"), ()),
        (("--workers", "2"), ("--accumulate", "2")),
        (("--workers", "2", "--engine", "ray"), ()),
        (("--workers", "2", "--strategy", "zero1"), ()),
        (("--workers", "2", "--strategy", "zero2"), ()),
        (("--workers", "2", "--strategy", "zero3"), ()),
    ],
    ids=["ddp", "fsdp", "fsdp2", "accumulated", "ray", "zero1", "zero2", "zero3"],
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


def test_16_bits_train_as_32_do(storage: Path, script: tuple[str, ...], one_worker: list[dict[str, Any]]) -> None:
    rounded = trained(storage, "bf16", ("--precision", "bf16"), *script)
    assert len(rounded) == len(one_worker)
    steps = [(one, other) for one, other in zip(rounded, one_worker, strict=True) if "loss" in one]
    assert all(one["loss"] == pytest.approx(other["loss"], rel=0.01) for one, other in steps)
    # It really is rounded: gradients say so more than losses do.
    assert any(one["gradient_norm"] != pytest.approx(other["gradient_norm"], rel=1e-3) for one, other in steps)


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


def test_a_stopped_run_refuses_other_utterances(tmp_path: Path, script: tuple[str, ...], codes_file: Path) -> None:
    """Where it stands among its batches would mean nothing, and held-out texts would be others."""
    words = [sys.executable, "-m", "keepstep", "run", "--name", "a", "--storage", str(tmp_path)]
    words += [str(RECIPE / "train.py")]
    going = subprocess.Popen([*words, *script, "--num-epochs", "500"], stderr=subprocess.DEVNULL)
    metrics = tmp_path / "a" / "metrics.jsonl"
    while going.poll() is None and (not metrics.exists() or metrics.read_text().count("\n") < 4):
        time.sleep(0.1)
    going.send_signal(signal.SIGTERM)
    assert going.wait(100) == 75
    fewer = tmp_path / "codes.jsonl"
    write_rows(fewer, read_rows(codes_file, needed=("audio",))[1:])
    again = [*script, "--num-epochs", "500", "--codes", str(fewer)]
    done = subprocess.run([*words, *again], capture_output=True, text=True, timeout=200)
    assert done.returncode == 2, done.stderr
    assert "the run was begun with other utterances or batches (22 utterances" in done.stderr


def test_an_average_is_of_what_was_trained_however_short_the_run_was() -> None:
    """0.999 a step keeps nine tenths of the base model through a hundred steps."""
    model, average = torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(average.weight)
    with torch.no_grad():
        for step in range(1, 101):
            model.weight.fill_(step / 100)
            update_average(average, model, 0.999, step)
        assert 0.8 < average.weight.item() < 1
        for step in range(101, 20_000):
            update_average(average, model, 0.999, step)
        before = average.weight.item()
        model.weight.fill_(2.0)
        update_average(average, model, 0.999, 20_000)
    assert average.weight.item() - before == pytest.approx(0.001, rel=0.01)


def test_an_exported_voice_speaks(storage: Path, one_worker: list[dict[str, Any]], tmp_path: Path) -> None:
    folder = export_voice(storage / "one", tmp_path / "voice", dtype="fp32")
    voice = load_voice_model(str(folder))
    assert voice.get_supported_speakers() == ["anna", "bert"]
    assert wants_whole_text(voice)
    assert trained_language(voice) == "auto"
    saved = load_file(storage / "one" / "artifacts" / "voice.safetensors")
    loaded = voice.model.state_dict()
    assert saved.keys() == loaded.keys()
    assert all(torch.equal(loaded[name], saved[name]) for name in saved)
    wavs, rate = voice.generate_custom_voice("Hello.", speaker="Bert", max_new_tokens=12)
    assert rate == 24_000 and 0 < len(wavs[0]) <= 12 * 1920
    card = (folder / "README.md").read_text()
    best = min(line["validation_loss"] for line in one_worker if "validation_loss" in line)
    assert all(words in card for words in ("22 utterances", "held-out texts", f"{best:.4g}", "Consent was stated"))
    assert json.loads((folder / "consent.json").read_text())["speakers"] == ["anna", "bert"]
    held_out = read_rows(folder / "held_out.jsonl", needed=("audio", "text", "speaker"))
    assert len(held_out) == 2 and all(Path(row["audio"]).is_file() for row in held_out)
    with pytest.raises(ValueError, match="is there already"):
        export_voice(storage / "one", folder)
    before = (folder / "model.safetensors").stat().st_mtime_ns
    export_voice(storage / "one", folder, dtype="fp32", overwrite=True)
    assert (folder / "model.safetensors").stat().st_mtime_ns > before
    (folder / "consent.json").unlink()
    with pytest.raises(ValueError, match=r"no voice that export.py wrote"):
        export_voice(storage / "one", folder, overwrite=True)
    assert (folder / "README.md").is_file()


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
