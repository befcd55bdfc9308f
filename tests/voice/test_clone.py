"""Cloning without training: by x-vector or in context, marked as synthetic; what cannot be cloned is said in a line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from audio import load_audio, read_provenance, write_wav
from zero_shot_clone import load_reference, loudness_db, main, parse

TEXT = "Good morning to you all."
NOISE = np.random.default_rng(0).normal(0, 0.1, 40 * 24_000).astype(np.float32)


@pytest.fixture
def reference(tmp_path: Path, speech: Path) -> Path:
    path = tmp_path / "voice.wav"
    write_wav(path, load_audio(speech / "lj" / "LJ001-0002.flac"))
    return path


def run(model: Path, reference: Path | str, output: Path, *more: str, consent: bool = True, text: str = TEXT) -> None:
    agreed = ["--i-have-consent"] if consent else []
    main(["--ref-audio", str(reference), "--text", text, "--output", str(output), "--model", str(model), "--device",
          "cpu", "--max-new-tokens", "40", *agreed, *more])  # fmt: skip


@pytest.mark.parametrize(
    ("more", "method"), [([], "x-vector"), (["--ref-text", "in being comparatively modern."], "in context")]
)
def test_it_says_how_it_cloned_and_where_to(
    tiny_model: Path, reference: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], method: str
) -> None:
    output = tmp_path / "new" / "out.wav"
    run(tiny_model, reference, output, "--consent-note", "form 7", *more)
    printed = capsys.readouterr().out
    assert printed.startswith(method) and "real-time factor" in printed and str(output) in printed
    told = read_provenance(output)
    assert told["synthetic"] == "yes" and told["model"] == str(tiny_model) and told["consent"] == "stated; form 7"
    assert told["method"].startswith(method)
    assert f"{load_audio(output).size / 24_000:.1f} s of speech" in printed


def test_the_seed_decides(tiny_model: Path, reference: Path, tmp_path: Path) -> None:
    first, again, other = (tmp_path / f"{number}.wav" for number in range(3))
    run(tiny_model, reference, first)
    run(tiny_model, reference, again)
    run(tiny_model, reference, other, "--seed", "1")
    assert first.read_bytes() == again.read_bytes() != other.read_bytes()


def test_the_reference_and_its_text_are_used(
    tiny_model: Path, reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from qwen_tts import Qwen3TTSModel

    asked: list[dict[str, Any]] = []

    def generate(self: Any, **given: Any) -> tuple[list[Any], int]:
        asked.append(given)
        return [np.zeros(48_000, np.float32)], 24_000

    monkeypatch.setattr(Qwen3TTSModel, "generate_voice_clone", generate)
    run(tiny_model, reference, tmp_path / "a.wav", "--language", "English")
    run(tiny_model, reference, tmp_path / "b.wav", "--ref-text", " What it says. ")
    run(tiny_model, reference, tmp_path / "c.wav", "--x-vector-only")
    assert [given["x_vector_only_mode"] for given in asked] == [True, False, True]
    assert [given["ref_text"] for given in asked] == [None, "What it says.", None]
    assert [given["language"] for given in asked] == ["english", "auto", "auto"]
    assert all(np.array_equal(given["ref_audio"][0], load_audio(reference)) for given in asked)
    assert {given["max_new_tokens"] for given in asked} == {40}


def test_a_text_that_was_cut_is_said(
    tiny_model: Path, reference: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tiny_model, reference, tmp_path / "out.wav", "--max-new-tokens", "5")
    assert "stopped by --max-new-tokens" in capsys.readouterr().out


def test_the_most_is_what_the_model_says_if_nothing_else_is(tiny_model: Path, reference: Path) -> None:
    from qwen import load_voice_model
    from zero_shot_clone import MAX_NEW_TOKENS, clone, most_tokens

    model = load_voice_model(str(tiny_model))
    assert most_tokens(model) == 64  # of its generation_config.json
    wav = load_reference(reference)
    model.generate_defaults = {"max_new_tokens": 5}
    assert clone(model, TEXT, wav).cut_short
    assert not clone(model, TEXT, wav, max_new_tokens=64).cut_short
    model.generate_defaults = None
    assert most_tokens(model) == MAX_NEW_TOKENS


def test_letters_of_other_languages_are_warned_of(
    tiny_model: Path, reference: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tiny_model, reference, tmp_path / "out.wav", text="Mr. Wa\u0142\u0119sa came from Gda\u0144sk.")
    assert "has the letters \u0119, \u0142, \u0144: words" in capsys.readouterr().out


def write(tmp_path: Path, seconds: float, scale: float = 1.0) -> Path:
    path = tmp_path / "made.wav"
    write_wav(path, scale * NOISE[: int(seconds * 24_000)])
    return path


@pytest.mark.parametrize(
    ("seconds", "scale", "words"),
    [(0.5, 1.0, "0.50 s"), (31, 1.0, "--trim-reference"), (3, 0.001, "silent"), (3, 0, "silent")],
)
def test_references_that_tell_no_voice_are_refused(
    tiny_model: Path, tmp_path: Path, seconds: float, scale: float, words: str
) -> None:
    with pytest.raises(SystemExit, match=words):
        run(tiny_model, write(tmp_path, seconds, scale), tmp_path / "out.wav")
    assert not (tmp_path / "out.wav").exists()


def test_quiet_speech_is_no_silence(reference: Path, tmp_path: Path) -> None:
    quiet = tmp_path / "quiet.wav"
    write_wav(quiet, 0.03 * load_audio(reference))
    load_reference(quiet)
    # And a word between long pauses is none either.
    wav = np.concatenate([np.zeros(20 * 24_000, np.float32), load_audio(reference)])
    assert loudness_db(wav) > loudness_db(load_audio(reference)) - 6


def test_a_long_reference_is_trimmed_if_asked(tmp_path: Path) -> None:
    path = write(tmp_path, 31)
    assert len(load_reference(path, trim=True)) == 30 * 24_000
    assert np.array_equal(load_reference(path, trim=True), load_audio(path)[: 30 * 24_000])


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--text", "  "], "nothing to say"),
        (["--text", "?!"], "nothing to say"),
        (["--text", "\u0928\u092e\u0938\u094d\u0924\u0947"], "written in Devanagari letters.*Chinese, English"),
        (["--language", "Klingon"], "'Klingon' is not one of the model's: auto, chinese, english, german"),
        (["--x-vector-only", "--ref-text", "a"], "leave one of them out"),
        (["--trim-reference", "--ref-text", "a"], "more than the cut recording"),
        (["--output", "out.mp3"], "name it .wav"),
        (["--ref-audio", "none.wav"], "none.wav is not a file"),
        (["--max-new-tokens", "1"], "at least 2"),
        (["--model", "/no/model"], "/no/model is not there"),
        pytest.param(
            ["--device", "cuda"], "finds no GPU", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="GPU")
        ),
    ],
)
def test_what_cannot_be_cloned_is_said_in_a_line(
    tiny_model: Path, reference: Path, tmp_path: Path, more: list[str], words: str
) -> None:
    with pytest.raises(SystemExit, match=words) as ended:
        run(tiny_model, reference, tmp_path / "out.wav", *more)
    assert "\n" not in str(ended.value)


def test_a_corrupt_reference_is_named(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "bad.wav"
    path.write_bytes(b"RIFF" + bytes(100))
    with pytest.raises(SystemExit, match=r"bad.wav can't be read"):
        run(tiny_model, path, tmp_path / "out.wav")


def test_nothing_is_cloned_without_consent(tiny_model: Path, reference: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="--i-have-consent"):
        run(tiny_model, reference, tmp_path / "out.wav", consent=False)
    assert not (tmp_path / "out.wav").exists()


def test_a_model_that_is_no_base_model_is_refused(tiny_model: Path, reference: Path, tmp_path: Path) -> None:
    other = tmp_path / "custom"
    shutil.copytree(tiny_model, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"tts_model_type": "custom_voice"}))
    with pytest.raises(SystemExit, match=r"is a custom_voice model.*Base"):
        run(other, reference, tmp_path / "out.wav")


def test_a_telephones_recording_is_cloned_with_a_word(
    tiny_model: Path, reference: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "phone.wav"
    write_wav(path, load_audio(reference, 8_000), 8_000)
    run(tiny_model, path, tmp_path / "out.wav")
    assert "has 8,000 Hz: what is above 4,000 Hz is not in it" in capsys.readouterr().out


def test_the_help_shows_every_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--help"])
    assert "Qwen/Qwen3-TTS-12Hz-1.7B-Base" in capsys.readouterr().out
