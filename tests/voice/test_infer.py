"""Both voices speak the same texts: alike for a seed, resumable, marked, and wrong input in one line."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("av", reason="needs keepstep[voice]")
pytest.importorskip("transformers", reason="needs keepstep[voice]")

from voice.recordings import recordings

TOKENS = 8


def make_voice(
    tiny_model: Path,
    folder: Path,
    speakers: tuple[str, ...] = ("anna",),
    language: str = "auto",
    streaming: bool = False,
) -> Path:
    """A custom voice as export.py writes it, of the untrained weights."""
    import torch
    from export import custom_voice_config, custom_voice_weights
    from safetensors.torch import load_file, save_file
    from tiny import CODEBOOK_SIZE

    shutil.copytree(tiny_model, folder)
    weights = load_file(folder / "model.safetensors")
    talker = {name: value for name, value in weights.items() if not name.startswith("speaker_encoder.")}
    save_file(custom_voice_weights(talker, torch.float32), folder / "model.safetensors", metadata={"format": "pt"})
    ids = {speaker: CODEBOOK_SIZE + 500 + number for number, speaker in enumerate(speakers)}
    about = {"speakers": ids, "streaming": streaming, "language": language, "base_model": str(tiny_model)}
    config = custom_voice_config(json.loads((folder / "config.json").read_text()), about, "fp32")
    (folder / "config.json").write_text(json.dumps(config))
    consent = {"consent": "stated", "speakers": list(speakers), "note": "a signed form", "date": "2026-01-01"}
    (folder / "consent.json").write_text(json.dumps(consent))
    return folder


@pytest.fixture(scope="module")
def voice(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_voice(tiny_model, tmp_path_factory.mktemp("voice") / "voice-anna")


@pytest.fixture
def flags(speech: Path, tiny_model: Path, voice: Path, tmp_path: Path) -> dict[str, str]:
    from rows import write_rows

    lj = recordings(speech, "lj")
    rows: list[dict[str, Any]] = [{"text": text, "audio": str(path)} for path, text in lj[1:3]]
    write_rows(tmp_path / "held_out.jsonl", [*rows, {"text": "Without a recording.", "language": "English"}])
    return {
        "--base-model": str(tiny_model),
        "--voice": str(voice),
        "--texts": str(tmp_path / "held_out.jsonl"),
        "--ref-audio": str(lj[0][0]),
        "--output-dir": str(tmp_path / "evaluation"),
        "--max-new-tokens": str(TOKENS),
        "--device": "cpu",
    }


def infer(flags: dict[str, str], *more: str, consent: bool = True) -> list[dict[str, Any]]:
    import infer
    from rows import read_rows

    agreed = ["--i-have-consent", "--consent-note", "she was asked"] if consent else []
    infer.main([part for pair in flags.items() for part in pair] + agreed + list(more))
    return read_rows(Path(flags["--output-dir"]) / "generated.jsonl", needed=("id", "text", "base", "fine_tuned"))


def contents(rows: list[dict[str, Any]]) -> list[bytes]:
    return [Path(row[system]).read_bytes() for row in rows for system in ("base", "fine_tuned")]


def test_both_say_every_text_and_say_that_they_are_synthetic(flags: dict[str, str]) -> None:
    from audio import load_audio, read_provenance

    rows = infer(flags)
    assert [row["id"] for row in rows] == ["0001", "0002", "0003"]
    assert [row["language"] for row in rows] == ["auto", "auto", "english"]
    assert ["real" in row for row in rows] == [True, True, False]
    for row in rows:
        for system in ("base", "fine_tuned"):
            wav = load_audio(row[system])
            assert len(wav) == row["frames"][system] * 1920
            # An untrained model does not come to an end.
            assert row["cut"][system] == (row["frames"][system] >= TOKENS - 1)
            assert row["seconds"][system] > 0
            tags = read_provenance(row[system])
            assert (tags["synthetic"], tags["speaker"]) == ("yes", "anna")
            # The voice's own consent covers its speech, and says nothing of the recording that is cloned.
            assert tags["consent"] == {"base": "stated; she was asked", "fine_tuned": "stated; a signed form"}[system]
    assert any(row["cut"]["base"] for row in rows)
    assert read_provenance(rows[0]["real"])["synthetic"] == "no"
    assert "x-vector" in read_provenance(rows[0]["base"])["method"]
    assert contents(rows)[0] != contents(rows)[1]
    settings = json.loads((Path(flags["--output-dir"]) / "infer.json").read_text())
    assert (settings["speaker"], settings["clone_mode"]) == ("anna", "x-vector")
    written = (Path(flags["--output-dir"]) / "generated.jsonl").read_text()
    assert '"base": "base/0001.wav"' in written


def test_a_seed_gives_the_same_speech_and_another_one_other_speech(flags: dict[str, str], tmp_path: Path) -> None:
    first = contents(infer(flags))
    assert contents(infer(flags | {"--output-dir": str(tmp_path / "again")})) == first
    others = contents(infer(flags | {"--output-dir": str(tmp_path / "other"), "--seed": "1"}))
    assert all(one != other for one, other in zip(first, others, strict=True))


@pytest.mark.parametrize("batch_size", ["1", "2"])
def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(
    flags: dict[str, str], batch_size: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import infer as module

    flags |= {"--batch-size": batch_size}
    whole = contents(infer(flags | {"--output-dir": flags["--output-dir"] + "-whole"}))

    real_write, num_written = module.write_rows, 0

    def write_and_stop(*args: Any) -> None:
        nonlocal num_written
        real_write(*args)
        num_written += 1
        if num_written == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "write_rows", write_and_stop)
        with pytest.raises(KeyboardInterrupt):
            infer(flags)
    capsys.readouterr()
    assert contents(infer(flags)) == whole
    assert "base: 0 of 3 still to say" in capsys.readouterr().out


def test_what_is_there_is_kept_until_something_changes(
    flags: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import infer as module

    before = infer(flags)
    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr(module, "load_voice_model", lambda *_: pytest.fail("a model was loaded for nothing"))
        assert infer(flags) == before
    assert "fine_tuned: 0 of 3 still to say" in capsys.readouterr().out
    Path(before[1]["base"]).unlink()
    infer(flags)
    assert "base: 1 of 3 still to say" in capsys.readouterr().out
    infer(flags | {"--max-new-tokens": "5"})
    assert "base: 3 of 3 still to say" in capsys.readouterr().out


def test_the_same_weights_written_anew_say_nothing_anew_and_others_do(
    flags: dict[str, str], tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = make_voice(tiny_model, tmp_path / "voice")
    infer(flags | {"--voice": str(first)})
    capsys.readouterr()
    again = make_voice(tiny_model, tmp_path / "elsewhere")
    codec, tuned = again / "speech_tokenizer" / "model.safetensors", again / "model.safetensors"
    for path in (codec, tuned):
        os.utime(path, (0, 0))
    infer(flags | {"--voice": str(again)})
    assert "fine_tuned: 0 of 3 still to say" in capsys.readouterr().out
    for path in (codec, tuned):
        content = bytearray(path.read_bytes())
        content[-3] ^= 1  # the size stays, and so does the time
        path.write_bytes(content)
        os.utime(path, (0, 0))
        infer(flags | {"--voice": str(again)})
        said = capsys.readouterr().out
        assert "base: 0 of 3 still to say" in said and "fine_tuned: 3 of 3 still to say" in said


def test_with_its_text_the_reference_is_gone_on_from(flags: dict[str, str], speech: Path) -> None:
    from audio import read_provenance

    by_voice = contents(infer(flags))
    rows = infer(flags, "--ref-text", recordings(speech, "lj")[0][1])
    in_context = contents(rows)
    assert "in context" in read_provenance(rows[0]["base"])["method"]
    assert [one != other for one, other in zip(by_voice, in_context, strict=True)] == [True, False] * 3


def test_texts_may_be_lines(flags: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("One line.\n\nAnother line.\n")
    rows = infer(flags | {"--texts": str(tmp_path / "texts.txt"), "--language": "German"})
    assert [(row["text"], row["language"]) for row in rows] == [("One line.", "german"), ("Another line.", "german")]


def test_letters_that_may_be_said_wrong_are_named(
    flags: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "texts.txt").write_text("Mr. Wa\u0142\u0119sa.\nHe came from \u0141\u00f3d\u017a.\n", encoding="utf-8")
    infer(flags | {"--texts": str(tmp_path / "texts.txt")})
    assert "no language of Qwen3-TTS has the letters \u0119, \u0141, \u0142, \u017a" in capsys.readouterr().out


def test_one_of_several_speakers_is_chosen(flags: dict[str, str], tiny_model: Path, tmp_path: Path) -> None:
    both = str(make_voice(tiny_model, tmp_path / "both", ("anna", "bob")))
    with pytest.raises(SystemExit, match=r"several speakers \(anna, bob\)"):
        infer(flags | {"--voice": both})
    with pytest.raises(SystemExit, match="no speaker carla; it has anna, bob"):
        infer(flags | {"--voice": both, "--speaker": "carla"})
    anna = contents(infer(flags | {"--voice": both, "--speaker": "Anna"}))
    bob = contents(infer(flags | {"--voice": both, "--speaker": "bob"}))
    assert [one != other for one, other in zip(anna, bob, strict=True)] == [False, True] * 3


def test_a_real_recording_that_is_gone_costs_that_recording_alone(flags: dict[str, str], tmp_path: Path) -> None:
    from rows import write_rows

    write_rows(tmp_path / "gone.jsonl", [{"text": "A text.", "audio": str(tmp_path / "gone.wav")}])
    row = infer(flags | {"--texts": str(tmp_path / "gone.jsonl")})[0]
    assert "real" not in row
    assert "gone.wav is not a file" in row["real_missing"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"--language": "klingon"}, "'klingon' is not one of the model's"),
        ({"--base-model": "VOICE"}, "is a custom_voice model"),
        ({"--voice": "BASE"}, "is a base model; a fine-tuned voice is expected"),
        ({"--voice": "/nowhere"}, r"has no config\.json"),
        ({"--texts": "/nowhere.txt"}, "is not there"),
        ({"--texts": "WORDLESS"}, r"wordless\.txt, text 1: there is nothing to say"),
        ({"--texts": "NUMBERS"}, r"numbers\.jsonl, text 2: its text is 5, and a string is expected"),
        ({"--texts": "ARABIC"}, r"text 1: the text .* is written in Arabic letters.*English"),
        ({"--ref-audio": "/nowhere.wav"}, "is not a file"),
        ({"--max-new-tokens": "1"}, "at least 3"),
        ({"--batch-size": "0"}, "at least 1"),
    ],
)
def test_wrong_input_is_one_line(
    flags: dict[str, str], voice: Path, tiny_model: Path, tmp_path: Path, changed: dict[str, str], message: str
) -> None:
    files = {
        "WORDLESS": ("wordless.txt", "...\n"),
        "NUMBERS": ("numbers.jsonl", '{"text": "One."}\n{"text": 5}\n'),
        "ARABIC": ("arabic.txt", "\u0645\u0631\u062d\u0628\u0627\n"),
    }
    places = {"VOICE": str(voice), "BASE": str(tiny_model)}
    for place, (name, content) in files.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
        places[place] = str(tmp_path / name)
    with pytest.raises(SystemExit, match=message):
        infer(flags | {name: places.get(value, value) for name, value in changed.items()})


def test_who_speaks_in_the_reference_must_have_agreed(flags: dict[str, str]) -> None:
    with pytest.raises(SystemExit, match=r"whoever speaks in .*: say --i-have-consent if they agreed"):
        infer(flags, consent=False)
    assert not Path(flags["--output-dir"]).exists()


def test_the_flag_covers_a_voice_without_a_record_of_consent(
    flags: dict[str, str], tiny_model: Path, tmp_path: Path
) -> None:
    from audio import read_provenance

    bare = make_voice(tiny_model, tmp_path / "bare")
    (bare / "consent.json").unlink()
    rows = infer(flags | {"--voice": str(bare)}, "--consent-note", "CC0")
    assert {read_provenance(rows[0][system])["consent"] for system in ("base", "fine_tuned")} == {"stated; CC0"}


def test_without_base_model_it_is_what_the_voice_was_made_from(
    flags: dict[str, str], tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import infer as module

    by_name = contents(infer(flags))
    assert "made from" not in capsys.readouterr().out
    without = {name: value for name, value in flags.items() if name != "--base-model"}
    assert contents(infer(without)) == by_name
    printed = capsys.readouterr().out
    assert f"base model: {tiny_model} (the voice was made from it" in printed and "base: 0 of 3 still" in printed
    settings = json.loads((Path(flags["--output-dir"]) / "infer.json").read_text())
    assert settings["base_model"] == str(tiny_model)
    other = shutil.copytree(tiny_model, tmp_path / "other")
    args = module.parse(["--base-model", str(other), "--voice", flags["--voice"], "--ref-audio", "ref.wav"])
    assert module.base_model_of(args) == str(other)
    assert f"{other} is compared, and the voice was made from {tiny_model}" in capsys.readouterr().out


def test_a_voice_that_does_not_say_what_it_was_made_from_is_compared_with_a_word(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import infer as module
    from qwen import BASE_MODELS

    old = make_voice(tiny_model, tmp_path / "old")
    config = json.loads((old / "config.json").read_text())
    (old / "config.json").write_text(json.dumps({k: v for k, v in config.items() if not k.startswith("trained_")}))
    args = module.parse(["--voice", str(old), "--ref-audio", "ref.wav"])
    assert module.base_model_of(args) == BASE_MODELS[1]  # as train.py has it
    assert "does not say what it was made from; --base-model names another" in capsys.readouterr().out


def test_without_texts_they_are_what_training_held_out_of_the_speaker(
    flags: dict[str, str], tiny_model: Path, tmp_path: Path, speech: Path
) -> None:
    from rows import write_rows

    lj, kathleen = recordings(speech, "lj")[1], recordings(speech, "kathleen")[1]
    both = make_voice(tiny_model, tmp_path / "both", ("anna", "bob"))
    without = {name: value for name, value in flags.items() if name != "--texts"}
    without |= {"--voice": str(both), "--speaker": "anna"}
    with pytest.raises(SystemExit, match=r"both has no held_out\.jsonl.*--texts"):
        infer(without)
    said = [{"text": text, "audio": str(p), "speaker": w} for (p, text), w in ((kathleen, "bob"), (lj, "Anna"))]
    write_rows(both / "held_out.jsonl", said)
    rows = infer(without)
    assert [(row["text"], row["source"]) for row in rows] == [(lj[1], str(lj[0]))]
    write_rows(both / "held_out.jsonl", said[:1])
    with pytest.raises(SystemExit, match="has no text of anna: name others with --texts"):
        infer(without)
    # A text of bob's may be said by anna, but his recording is none of hers.
    rows = infer(without | {"--texts": str(both / "held_out.jsonl")})
    assert [("source" in row, "real" in row) for row in rows] == [(False, False)]


@pytest.mark.parametrize(
    ("trained", "given", "asked"),
    [
        ("auto", "auto", {"base": ["auto", "auto", "english"], "fine_tuned": ["auto"] * 3}),
        ("german", "auto", {"base": ["auto", "auto", "english"], "fine_tuned": ["german"] * 3}),
        ("german", "English", {"base": ["english"] * 3, "fine_tuned": ["english"] * 3}),
    ],
)
def test_a_voice_is_asked_in_the_language_it_was_trained_in(
    flags: dict[str, str],
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    trained: str,
    given: str,
    asked: dict[str, list[str]],
) -> None:
    from qwen_tts import Qwen3TTSModel

    heard: dict[str, list[str]] = {"base": [], "fine_tuned": []}
    clone, custom = Qwen3TTSModel.generate_voice_clone, Qwen3TTSModel.generate_custom_voice

    def noted_clone(self: Any, texts: Any, languages: list[str], **more: Any) -> Any:
        heard["base"] += languages
        return clone(self, texts, languages, **more)

    def noted_custom(self: Any, texts: Any, speaker: str, languages: list[str], **more: Any) -> Any:
        heard["fine_tuned"] += languages
        return custom(self, texts, speaker, languages, **more)

    monkeypatch.setattr(Qwen3TTSModel, "generate_voice_clone", noted_clone)
    monkeypatch.setattr(Qwen3TTSModel, "generate_custom_voice", noted_custom)
    voice = make_voice(tiny_model, tmp_path / "voice", language=trained)
    infer(flags | {"--voice": str(voice), "--language": given})
    # Without the first one, which is said to make all ready.
    assert {system: languages[1:] for system, languages in heard.items()} == asked


@pytest.mark.parametrize("streaming", [False, True])
def test_a_voice_gets_its_text_as_it_did_in_training(
    flags: dict[str, str], tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, streaming: bool
) -> None:
    from qwen_tts import Qwen3TTSModel

    folder = make_voice(tiny_model, tmp_path / "voice", streaming=streaming)
    modes = []
    original = Qwen3TTSModel.generate_custom_voice

    def noted(self: Any, *words: Any, **options: Any) -> Any:
        modes.append(options["non_streaming_mode"])
        return original(self, *words, **options)

    monkeypatch.setattr(Qwen3TTSModel, "generate_custom_voice", noted)
    infer(flags | {"--voice": str(folder)})
    assert set(modes) == {not streaming}


def test_a_codec_of_another_rate_is_resampled() -> None:
    import numpy as np
    from infer import _wavs

    (wav,) = _wavs(([np.sin(np.arange(22_050) / 20)], 22_050))
    assert wav.dtype == np.float32 and len(wav) == 24_000
