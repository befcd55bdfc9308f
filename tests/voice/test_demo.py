"""The page: what stands behind its button, and the button itself, on this machine alone."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from audio import load_audio, read_provenance, write_wav

pytest.importorskip("gradio", reason="needs keepstep[voice]")

import demo
from demo import HOST, Studio, load_studio, main, require_free, spectrogram

TEXT = "Good morning."


class Encoder:
    """An embedding by loudness: all that the page needs to show a number."""

    def embed(self, wav: Any) -> Any:
        return np.array([0.6, 0.8], np.float32)


@pytest.fixture(scope="session")
def custom_voice(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model as if it were trained to two voices."""
    folder = tmp_path_factory.mktemp("voice") / "voice"
    shutil.copytree(tiny_model, folder)
    config = json.loads((folder / "config.json").read_text())
    config["tts_model_type"] = "custom_voice"
    config["talker_config"] |= {"spk_id": {"anna": 1000, "ben": 1001}, "spk_is_dialect": {"anna": False, "ben": False}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def loaded(tiny_model: Path, custom_voice: Path, tmp_path_factory: pytest.TempPathFactory) -> Studio:
    studio = load_studio(str(tiny_model), str(custom_voice), "cpu", tmp_path_factory.mktemp("said"))
    assert studio.encoder is not None
    return studio


@pytest.fixture
def studio(loaded: Studio, tmp_path: Path) -> Studio:
    return replace(loaded, encoder=Encoder(), folder=tmp_path, num_said=0)


@pytest.fixture
def reference(tmp_path: Path, speech: Path) -> str:
    path = tmp_path / "ref.wav"
    write_wav(path, load_audio(speech / "lj" / "LJ001-0002.flac"))
    return str(path)


@pytest.fixture(scope="session")
def address(tiny_model: Path, custom_voice: Path) -> Iterator[str]:
    """The page as a user starts it."""
    with socket.socket() as free:
        free.bind((HOST, 0))
        port = free.getsockname()[1]
    words = [sys.executable, demo.__file__, "--model", str(tiny_model), "--voice", str(custom_voice), "--device", "cpu"]
    with subprocess.Popen([*words, "--port", str(port)], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == f"open http://{HOST}:{port} (Ctrl-C ends it)\n"
        wait_for(port)
        yield f"http://{HOST}:{port}/"
        server.terminate()  # a shell's background job is deaf to SIGINT


def wait_for(port: int) -> None:
    for _ in range(300):
        with socket.socket() as probe:
            if probe.connect_ex((HOST, port)) == 0:
                return
        time.sleep(0.1)
    pytest.fail(f"nobody listens at {port}")


def test_a_clone_and_a_trained_voice_side_by_side(studio: Studio, reference: str) -> None:
    path, trained, table = studio.say(reference, "", TEXT, "Auto", "ben", 0, True)
    assert trained is not None
    assert read_provenance(path)["method"].startswith("x-vector")
    assert read_provenance(trained)["method"] == "trained voice ben"
    assert read_provenance(trained)["model"] == studio.voice_name
    assert table.count("1.00") >= 2 and "trained voice ben" in table
    in_context, _, _ = studio.say(reference, "in being comparatively modern.", TEXT, "English", None, None, True)
    assert read_provenance(in_context)["method"].startswith("in context") and in_context != path


def test_a_trained_voice_speaks_the_language_it_was_trained_in(
    studio: Studio, reference: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from qwen import TRAINED_LANGUAGE

    assert studio.voice is not None
    asked = []
    original = studio.voice.generate_custom_voice

    def noted(text: str, speaker: str, language: str, **more: Any) -> Any:
        asked.append(language)
        return original(text, speaker, language, **more)

    monkeypatch.setattr(studio.voice, "generate_custom_voice", noted)
    studio.say(reference, "", TEXT, "Auto", "ben", 0, True)
    monkeypatch.setattr(studio.voice.model.config, TRAINED_LANGUAGE, "german", raising=False)
    studio.say(reference, "", TEXT, "Auto", "ben", 0, True)
    studio.say(reference, "", TEXT, "English", "ben", 0, True)
    assert asked == ["auto", "german", "english"]


def test_letters_of_other_languages_are_warned_of(studio: Studio, reference: str) -> None:
    studio.voice = None
    _, _, table = studio.say(reference, "", "Mr. Wa\u0142\u0119sa.", "Auto", None, 0, True)
    assert "has the letters \u0119, \u0142" in table


def test_without_a_model_it_is_what_the_voice_was_made_from(
    tiny_model: Path, custom_voice: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from qwen import BASE_MODELS, TRAINED_FROM

    loaded = []

    def only_named(path: str, device: str) -> None:
        loaded.append(path)
        raise ValueError("enough")

    monkeypatch.setattr(demo, "load_base", only_named)
    settings = json.loads((custom_voice / "config.json").read_text())
    says = tmp_path / "says"
    says.mkdir()
    (says / "config.json").write_text(json.dumps(settings | {TRAINED_FROM: str(tiny_model)}))
    for voice in (str(says), str(custom_voice), None):
        with pytest.raises(ValueError, match="enough"):
            load_studio(None, voice, "cpu", tmp_path)
    assert loaded == [str(tiny_model), BASE_MODELS[0], BASE_MODELS[0]]


def test_without_a_trained_voice_and_resemblyzer(studio: Studio, reference: str) -> None:
    studio.voice, studio.encoder = None, None
    _, trained, table = studio.say(reference, "", TEXT, "Auto", None, 0, True)
    assert trained is None and "pip install" in table


def test_the_similarity_is_measured_and_what_cannot_be_is_said(
    loaded: Studio, reference: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, table = loaded.say(reference, "", TEXT, "Auto", None, 0, True)
    similarities = [float(line.split("|")[-2]) for line in table.splitlines()[2:]]
    assert len(similarities) == 2 and max(similarities) < 0.8  # a tiny model speaks like nobody

    def silent(wav: Any) -> None:
        raise demo.Unscorable("it is silent")

    monkeypatch.setattr(loaded.encoder, "embed", silent)
    _, _, table = loaded.say(reference, "", TEXT, "Auto", None, 0, True)
    assert table.count("not measured: it is silent") == 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"agreed": False}, "consent"),
        ({"reference": None}, "record a voice"),
        ({"text": " "}, "nothing to say"),
        ({"text": "\u05e9\u05dc\u05d5\u05dd"}, "written in Hebrew letters"),
        ({"language": "Klingon"}, "not one of the model's"),
    ],
)
def test_the_page_refuses_in_words(studio: Studio, reference: str, change: dict[str, Any], words: str) -> None:
    asked = {
        "reference": reference,
        "ref_text": "",
        "text": TEXT,
        "language": "Auto",
        "speaker": None,
        "seed": 0,
        "agreed": True,
    }
    with pytest.raises(ValueError, match=words):
        studio.say(**(asked | change))


def test_a_long_recording_is_not_told_of_flags(studio: Studio, tmp_path: Path) -> None:
    path = tmp_path / "long.wav"
    write_wav(path, np.random.default_rng(0).normal(0, 0.1, 31 * 24_000).astype(np.float32))
    with pytest.raises(ValueError, match="scissors"):
        studio.say(str(path), "", TEXT, "Auto", None, 0, True)


def test_the_button(address: str, custom_voice: Path, reference: str, tmp_path: Path) -> None:
    from gradio_client import Client, exceptions, handle_file

    with contextlib.closing(
        Client(address, verbose=False, download_files=str(tmp_path), analytics_enabled=False)
    ) as page:
        given = (handle_file(reference), "", TEXT, "Auto", "anna", 3)
        table, cloned, trained, again, *pictures = page.predict(*given, True, api_name="/clone")
        assert "x-vector" in table and "trained voice anna" in table
        # What a user downloads is what was written, its mark included.
        assert read_provenance(cloned)["seed"] == "3"
        assert read_provenance(trained)["model"] == str(custom_voice)
        assert np.array_equal(load_audio(again), load_audio(reference))
        assert all(picture["plot"].startswith("data:image/") for picture in pictures) and len(pictures) == 3
        with pytest.raises(exceptions.AppError, match="consent"):
            page.predict(*given, False, api_name="/clone")


def test_nothing_is_reported_or_shared(address: str) -> None:
    import httpx

    assert os.environ["GRADIO_ANALYTICS_ENABLED"] == "False"
    assert address.startswith(f"http://{HOST}:")
    config = httpx.get(f"{address}config").json()
    assert config["analytics_enabled"] is False
    audio = [part["props"] for part in config["components"] if part["type"] == "audio"]
    assert [props["buttons"] for props in audio] == [["download"]] * 4


def test_a_taken_port_is_refused_with_a_free_one(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(SystemExit, match=rf"port {port} is taken .* --port \d+"):
            main(["--port", str(port)])
    require_free(port)
    with pytest.raises(ValueError, match="65535"):
        require_free(70_000)


def test_wrong_models_are_refused(tiny_model: Path, custom_voice: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is a custom_voice model"):
        load_studio(str(custom_voice), None, "cpu", tmp_path)
    with pytest.raises(ValueError, match=r"--voice .* is a base model"):
        load_studio(str(tiny_model), str(tiny_model), "cpu", tmp_path)


def test_without_resemblyzer_the_page_still_comes(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def absent(device: str) -> None:
        raise demo.Unavailable("speaker similarity needs resemblyzer: pip install 'keepstep[voice]'")

    monkeypatch.setattr(demo, "SpeakerEncoder", absent)
    assert load_studio(str(tiny_model), None, "cpu", tmp_path).encoder is None
    assert "no similarity: " in capsys.readouterr().out


def test_pictures_side_by_side_have_one_scale() -> None:
    tone = np.sin(2 * np.pi * 3_000 * np.arange(24_000) / 24_000).astype(np.float32)
    axes = spectrogram(tone, longest_s=2.0).axes[0]
    assert axes.get_xlim() == (0, 2.0)
    (image,) = axes.get_images()
    power_db = np.asarray(image.get_array())
    left, right, bottom, top = image.get_extent()
    assert (left, right, bottom, top) == (0, 1.0, 0, 12.0)
    assert 12.0 * power_db[:, 40].argmax() / len(power_db) == pytest.approx(3.0, abs=0.05)
    assert spectrogram(np.zeros(500, np.float32), 1.0).axes[0].get_images()  # shorter than a window, and silent
