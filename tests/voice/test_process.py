"""Recordings become rows of good speech; what is wrong becomes a row that says why; stopped and run again, the same."""

from __future__ import annotations

import json
import os
import re
import shutil
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("av", reason="needs keepstep[voice]")
pytest.importorskip("pyloudnorm", reason="needs keepstep[voice]")

import consent
import process
import transcripts
from audio import SAMPLE_RATE_HZ, audio_info, load_audio, read_provenance, write_wav
from process import main
from recording import Recorder, Settings, Source, loudness_lufs, normalised
from results import Results
from sources import Asked, find_files, segment_names, speaker_of
from spoken import compare, spoken_form
from transcripts import Given
from voice.recordings import recordings
from voice.test_audio import encode
from voice.whisper import whisper_base  # noqa: F401  a fixture

Wav = npt.NDArray[np.float32]
Row = dict[str, Any]


def read(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(folder: Path, *more: str, speaker: str | None = "Anna", workers: str = "0") -> tuple[list[Row], list[Row]]:
    named = () if speaker is None else ("--speaker-name", speaker)
    texts = ("--transcripts", str(folder / "texts.csv")) if (folder / "texts.csv").is_file() else ()
    folders = ("--input-dir", str(folder / "in"), "--output-dir", str(folder / "out"))
    main([*folders, *named, *texts, "--num-workers", workers, "--device", "cpu", "--i-have-consent", *more])
    return read(folder / "out" / "segments.jsonl"), read(folder / "out" / "rejected.jsonl")


def reasons(rejected: list[Row]) -> dict[str, str]:
    return {Path(row["source"]).name: row["reason"] for row in rejected}


def put(folder: Path, taken: list[tuple[Path, str]], into: str = "in") -> None:
    """Copies recordings, and adds their texts to texts.csv."""
    (folder / into).mkdir(parents=True, exist_ok=True)
    with (folder / "texts.csv").open("a") as texts:
        if texts.tell() == 0:
            texts.write("id|text\n")
        for path, text in taken:
            shutil.copy(path, folder / into)
            texts.write(f"{path.stem}|{text}\n")


@pytest.fixture
def lj(speech: Path, tmp_path: Path) -> Path:
    """A folder with four recordings and their texts."""
    put(tmp_path, recordings(speech, "lj")[:4])
    return tmp_path


def joined(taken: list[tuple[Path, str]], pause_s: float = 0.9) -> tuple[Wav, list[tuple[float, float, str]]]:
    """One long recording, and when what is said in it."""
    draw = np.random.default_rng(0)
    parts: list[Wav] = []
    times = []
    now_s = 0.0
    for path, text in taken:
        wav = load_audio(path)
        pause = draw.normal(0, 1e-3, int(pause_s * SAMPLE_RATE_HZ)).astype(np.float32)
        times.append((now_s, now_s + len(wav) / SAMPLE_RATE_HZ, text))
        parts += [wav, pause]
        now_s += (len(wav) + len(pause)) / SAMPLE_RATE_HZ
    return np.concatenate(parts), times


# ---- what comes out


def test_recordings_with_transcripts_become_rows(lj: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept, rejected = run(lj)
    assert rejected == []
    assert [row["text"] for row in kept] == [
        line.split("|")[1] for line in (lj / "texts.csv").read_text().splitlines()[1:]
    ]
    for number, row in enumerate(kept, 1):
        assert row["audio"] == f"segments/anna/LJ001-000{number}-0001.wav" and row["speaker"] == "anna"
        path = lj / "out" / row["audio"]
        info = audio_info(path)
        assert (info.sample_rate_hz, info.num_channels, info.codec) == (24_000, 1, "pcm_s16le")
        wav = load_audio(path)
        assert len(wav) / SAMPLE_RATE_HZ == pytest.approx(row["duration_s"], abs=0.001)
        assert loudness_lufs(wav) == pytest.approx(-23, abs=0.5) or np.abs(wav).max() == pytest.approx(0.89, abs=0.01)
        assert Path(row["source"]) == lj / "in" / f"LJ001-000{number}.flac"
        assert read_provenance(path)["source"] == f"LJ001-000{number}.flac"
    candidates = [row for row in kept if 3 <= row["duration_s"] <= 10]
    assert {row["ref_audio"] for row in kept} == {max(candidates, key=lambda row: row["snr_db"])["audio"]}
    summary = json.loads((lj / "out" / "process.json").read_text())
    assert summary["consent"]["speakers"] == ["anna"] and summary["counts"]["segments"] == 4
    printed = capsys.readouterr().out
    assert "kept: 4 segments" in printed
    assert "not compared with what is said: --asr-model" in printed.splitlines()[-1]
    assert "given transcripts, not compared with what is said" in (lj / "out" / "report.html").read_text()


def test_every_bad_recording_is_named_and_none_stops_the_others(lj: Path, speech: Path) -> None:
    import soxr

    folder = lj / "in"
    wav = load_audio(folder / "LJ001-0001.flac")
    text = recordings(speech, "lj")[0][1]
    (folder / "empty.wav").touch()
    (folder / "letter.mp3").write_bytes(b"Dear reader, " * 500)
    write_wav(folder / "silent.wav", np.zeros(5 * SAMPLE_RATE_HZ, np.float32))
    write_wav(folder / "hiss.wav", np.random.default_rng(0).normal(0, 0.05, 5 * SAMPLE_RATE_HZ).astype(np.float32))
    write_wav(folder / "telephone.wav", soxr.resample(wav, SAMPLE_RATE_HZ, 8_000), 8_000)
    write_wav(folder / "clipped.wav", np.clip(8 * wav, -0.5, 0.5))
    noise = np.random.default_rng(0).normal(0, 0.05, len(wav) + SAMPLE_RATE_HZ).astype(np.float32)
    write_wav(folder / "noisy.wav", np.pad(wav, (0, SAMPLE_RATE_HZ)) + noise)
    write_wav(folder / "quiet.wav", 0.01 * wav)
    write_wav(folder / "short.wav", wav[: int(0.7 * SAMPLE_RATE_HZ)])
    write_wav(folder / "long.wav", np.tile(wav, 2))
    write_wav(folder / "untold.wav", wav)
    encode(folder / "stereo.m4a", np.stack([wav, np.zeros_like(wav)]), SAMPLE_RATE_HZ, "aac")
    with (lj / "texts.csv").open("a") as texts:
        for path in sorted(folder.glob("[a-z]*")):
            said = {"short": "Printing", "long": f"{text} {text}"}.get(path.stem, text)
            if path.stem != "untold":
                texts.write(f"{path.name}|{said}\n")
        texts.write("nowhere|Who said this?\n")
    kept, rejected = run(lj)
    assert reasons(rejected) == {
        "empty.wav": "unreadable",
        "letter.mp3": "unreadable",
        "silent.wav": "silent",
        "hiss.wav": "no-speech",
        "telephone.wav": "narrow-band",
        "clipped.wav": "clipped",
        "noisy.wav": "noisy",
        "quiet.wav": "too-quiet",
        "short.wav": "too-short",
        "long.wav": "too-long",
        "untold.wav": "no-transcript",
        "texts.csv": "no-recording",
    }
    assert sorted(Path(row["source"]).name for row in kept) == [f"LJ001-000{k}.flac" for k in range(1, 5)] + [
        "stereo.m4a"
    ]
    for row in rejected:
        assert row["detail"] and row["speaker"] in ("anna", None)
        if "audio" in row:
            assert row["audio"].startswith("rejected/anna/") and (lj / "out" / row["audio"]).is_file()
    line = next(row for row in rejected if row["reason"] == "no-recording")
    assert "nowhere fits no recording" in line["detail"] and line["text"] == "Who said this?"

    page = (lj / "out" / "report.html").read_text()
    for reason in set(reasons(rejected).values()):
        assert f"<td class='reason'>{reason}</td>" in page
    sources = [unquote(name) for name in re.findall(r'<audio [^>]*src="([^"]+)"', page)]
    assert len(sources) >= 5 and all((lj / "out" / name).is_file() for name in sources)
    assert "://" not in page.replace("http://www.w3.org", "")

    kept, rejected = run(lj, "--allow-narrow-band", "--min-snr-db", "4", "--any-speaker")
    assert {"telephone.wav", "noisy.wav"} <= {Path(row["source"]).name for row in kept}
    assert all((lj / "out" / row["audio"]).is_file() for row in kept)


def test_another_speaker_among_the_recordings_is_found(
    lj: Path, speech: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(lj, recordings(speech, "kathleen")[:2])
    kept, rejected = run(lj)
    assert set(reasons(rejected).values()) == {"other-speaker"}
    assert {Path(row["source"]).parent.name + Path(row["source"]).stem[:6] for row in rejected} == {"inarctic"}
    assert len(kept) == 4 and min(row["similarity"] for row in kept) > 0.75
    assert "warning: anna: 2 of 6 segments do not sound like the rest" in capsys.readouterr().out
    assert not list((lj / "out" / "segments").rglob("arctic*"))


def test_folders_may_be_speakers(speech: Path, tmp_path: Path) -> None:
    put(tmp_path, recordings(speech, "lj")[:2], "in/LJ")
    put(tmp_path, recordings(speech, "kathleen")[:2], "in/Kathleen/day1")
    kept, rejected = run(tmp_path, "--speaker-from", "folder", speaker=None)
    assert rejected == []
    assert [row["speaker"] for row in kept] == ["kathleen", "kathleen", "lj", "lj"]
    assert all(Path(row["ref_audio"]).parent == Path(row["audio"]).parent for row in kept)


# ---- again


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_the_same_again_does_nothing_and_changes_nothing(lj: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(lj)
    before = contents(lj / "out")
    monkeypatch.setattr(process, "Worker", None)
    run(lj)
    assert contents(lj / "out") == before


def test_the_same_on_another_day_changes_nothing_either(lj: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def on(day: int, *more: str) -> dict[str, bytes]:
        monkeypatch.setattr(consent, "date", SimpleNamespace(today=lambda: date(2026, 1, day)))
        run(lj, *more)
        return contents(lj / "out")

    def stated(written: dict[str, bytes]) -> str:
        return str(json.loads(written["process.json"])["consent"]["date"])

    first = on(1)
    assert on(2) == first and stated(first) == "2026-01-01"
    assert stated(on(3, "--consent-note", "a new form")) == "2026-01-03"
    (lj / "in" / "LJ001-0002.flac").unlink()
    assert stated(on(4, "--consent-note", "a new form")) == "2026-01-04"
    (lj / "out" / "process.json").write_text("[]")
    assert stated(on(5)) == "2026-01-05"


def test_a_stopped_run_goes_on_and_ends_the_same(lj: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(lj)
    expected = contents(lj / "out")
    shutil.rmtree(lj / "out")
    original = Recorder.process
    seen: list[str] = []

    def stopped(self: Recorder, source: Source) -> Row:
        if len(seen) == 2:
            raise KeyboardInterrupt
        seen.append(source.relative)
        return original(self, source)

    monkeypatch.setattr(Recorder, "process", stopped)
    with pytest.raises(KeyboardInterrupt):
        run(lj)
    assert not (lj / "out" / "segments.jsonl").exists()
    done = set(seen)
    monkeypatch.setattr(
        Recorder, "process", lambda self, source: (seen.append(source.relative), original(self, source))[1]
    )
    run(lj)
    assert len(seen) == 4 and set(seen[2:]).isdisjoint(done)
    assert contents(lj / "out") == expected


def test_what_changed_is_done_anew_and_what_is_gone_is_removed(
    lj: Path, speech: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(lj)
    shutil.copy(speech / "lj" / "LJ001-0007.flac", lj / "in" / "LJ001-0001.flac")  # another recording of the name
    (lj / "in" / "LJ001-0002.flac").unlink()
    (lj / "out" / "segments" / "anna" / "LJ001-0003-0001.wav").write_bytes(b"damaged")
    seen: list[str] = []
    original = Recorder.process
    monkeypatch.setattr(
        Recorder, "process", lambda self, source: (seen.append(source.relative), original(self, source))[1]
    )
    kept, rejected = run(lj)
    assert sorted(seen) == ["LJ001-0001.flac", "LJ001-0003.flac"]
    assert [Path(row["source"]).name for row in kept] == ["LJ001-0001.flac", "LJ001-0003.flac", "LJ001-0004.flac"]
    assert reasons(rejected) == {"texts.csv": "no-recording"}
    names = [path.name for path in sorted((lj / "out").rglob("*.wav"))]
    assert names == ["LJ001-0001-0001.wav", "LJ001-0003-0001.wav", "LJ001-0004-0001.wav"]
    assert kept[0]["duration_s"] == pytest.approx(8.39, abs=0.2)


def test_other_limits_judge_anew_without_hearing_anew(lj: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, _ = run(lj)
    monkeypatch.setattr(process, "Worker", None)
    kept, rejected = run(lj, "--min-snr-db", "39")
    assert {row["text"] for row in kept} == {row["text"] for row in before if row["snr_db"] >= 39}
    assert {row["reason"] for row in rejected} == {"noisy"} and kept
    assert run(lj)[0] == before


def test_an_error_of_the_program_costs_one_recording_and_is_tried_again(
    lj: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*given: Any) -> Any:
        if Path(given[0].path).stem == "LJ001-0002":
            raise ZeroDivisionError("oh")
        return original(*given)

    import recording

    original = recording._text_figures
    monkeypatch.setattr(recording, "_text_figures", broken)
    kept, rejected = run(lj)
    assert len(kept) == 3 and reasons(rejected) == {"LJ001-0002.flac": "failed"}
    assert rejected[0]["detail"] == "ZeroDivisionError: oh"
    assert "in broken" in capsys.readouterr().err
    monkeypatch.setattr(recording, "_text_figures", original)
    kept, rejected = run(lj)
    assert len(kept) == 4 and rejected == []


def test_a_recording_that_kills_its_workers_is_left_alone(tmp_path: Path) -> None:
    source = Source("a.wav", "a.wav", "a", "anna", "Yes", 1, 1)
    results = Results(tmp_path / "out", Settings(None, "auto"))
    results.claim(tmp_path)
    assert results.begin(source) is None and results.begin(source) is None
    record = results.begin(source)
    assert record is not None and record["rejected"][0]["reason"] == "crashed" and record["retry"]
    results.claim(tmp_path)  # the next run leaves it alone, too
    results.prune([source], set())
    assert results.begin(source) == record
    results.forget_tries()
    assert results.begin(source) is None
    results.end(source)
    assert not list((tmp_path / "out").rglob("*.tries"))
    results.begin(source)
    results.prune([], set())  # it is gone
    assert not list((tmp_path / "out").rglob("*.tries"))


# ---- heard by Whisper


def test_a_long_recording_is_cut_with_the_words_that_are_said(
    speech: Path,
    tmp_path: Path,
    whisper_base: Path,  # noqa: F811
) -> None:
    taken = [recordings(speech, "lj")[k] for k in (0, 1, 3, 5, 6)]
    wav, times = joined(taken)
    (tmp_path / "in").mkdir()
    encode(tmp_path / "in" / "talk.mp4", wav[None], SAMPLE_RATE_HZ, "aac", with_video=True)
    kept, rejected = run(tmp_path, "--asr-model", str(whisper_base))
    assert rejected == [] and len(kept) >= 3
    assert {row["language"] for row in kept} == {"English"} and {row["transcript"] for row in kept} == {"asr"}
    assert compare(" ".join(text for _, text in taken), " ".join(row["text"] for row in kept)).wer < 0.1
    for row in kept:
        assert 1 <= row["duration_s"] <= 15
        said = [text for start_s, end_s, text in times if row["start_s"] - 0.3 < start_s and end_s < row["end_s"] + 0.3]
        assert all(spoken_form(text).split()[-1] in spoken_form(row["text"]) for text in said)


def test_a_long_given_transcript_is_split_with_its_recording(
    speech: Path,
    tmp_path: Path,
    whisper_base: Path,  # noqa: F811
) -> None:
    taken = [recordings(speech, "lj")[k] for k in (0, 1, 3, 5)]
    wav, _ = joined(taken)
    (tmp_path / "in").mkdir()
    write_wav(tmp_path / "in" / "talk.wav", wav)
    given = " ".join(text for _, text in taken).replace("arts and crafts", "ARTS & CRAFTS")
    (tmp_path / "texts.csv").write_text(f"id|text\ntalk|{given}\n")
    kept, rejected = run(tmp_path, "--asr-model", str(whisper_base), "--language", "English")
    assert rejected == [] and len(kept) >= 2
    assert " ".join(row["text"] for row in kept) == given  # as it was written, not as it was heard
    assert all(row["transcript"] == "given" and row["cer"] < 0.2 for row in kept)


def test_wrong_transcripts_are_found(
    speech: Path,
    tmp_path: Path,
    whisper_base: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    right, wrong, other = recordings(speech, "lj")[3:6]
    put(tmp_path, [right, (wrong[0], other[1])])
    kept, rejected = run(tmp_path, "--asr-model", str(whisper_base), "--language", "en")
    assert [row["text"] for row in kept] == [right[1]] and kept[0]["cer"] < 0.2
    assert reasons(rejected) == {wrong[0].name: "transcript-mismatch"}
    assert "differ from what was heard" in rejected[0]["detail"]
    assert "not compared" not in capsys.readouterr().out
    assert "given transcripts, compared with what is said" in (tmp_path / "out" / "report.html").read_text()


def test_a_language_that_the_model_does_not_speak_is_rejected(
    lj: Path, speech: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether its text is given or not; with the language stated it is taken."""
    shutil.copy(speech / "lj" / "LJ001-0007.flac", lj / "in")
    said = {path.stem: text for path, text in recordings(speech, "lj")}
    texts = iter(said[f"LJ001-000{k}"] for k in (1, 2, 3, 4, 7))

    class Whisper:
        def detect_language(self, wav: Wav) -> tuple[str, float, list[tuple[str, float]]]:
            return "pl", 0.97, [("pl", 0.97), ("uk", 0.02), ("ru", 0.01)]

        def transcribe(self, wav: Wav, language: str, **_: Any) -> tuple[list[Any], None]:
            assert language == "en"
            end_s = len(wav) / 16_000
            words = next(texts).split()
            step_s = end_s / len(words)
            timed = [
                SimpleNamespace(word=f" {word}", start=k * step_s, end=(k + 1) * step_s, probability=0.9)
                for k, word in enumerate(words)
            ]
            return [SimpleNamespace(words=timed)], None

    monkeypatch.setattr(transcripts, "_whisper", lambda: SimpleNamespace(WhisperModel=lambda *_, **__: Whisper()))
    (lj / "asr").mkdir()
    for name in ("model.bin", "config.json"):
        (lj / "asr" / name).touch()
    with pytest.raises(SystemExit, match="nothing can be used"):
        run(lj, "--asr-model", str(lj / "asr"))
    rejected = read(lj / "out" / "rejected.jsonl")
    assert reasons(rejected) == {f"LJ001-000{k}.flac": "other-language" for k in (1, 2, 3, 4, 7)}
    assert all("sounds like Polish (97%)" in row["detail"] and "--language" in row["detail"] for row in rejected)
    assert "a language that the model does not speak" in (lj / "out" / "report.html").read_text()
    kept, rejected = run(lj, "--asr-model", str(lj / "asr"), "--language", "English")
    assert len(kept) == 5 and rejected == []


@pytest.mark.ray
def test_workers_give_what_one_process_gives(lj: Path, ray_address: str, capsys: pytest.CaptureFixture[str]) -> None:
    (lj / "in" / "empty.wav").touch()
    run(lj)
    expected = contents(lj / "out")
    shutil.rmtree(lj / "out")
    run(lj, "--address", ray_address, workers="2")
    assert "2 workers on CPUs" in capsys.readouterr().out
    assert contents(lj / "out") == expected


@pytest.mark.ray
def test_a_worker_that_dies_costs_one_recording(lj: Path, ray_address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Dying(process.Worker):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            original = self._recorder.process
            self._recorder.process = lambda source: os._exit(1) if "0002" in source.name else original(source)

    monkeypatch.setattr(process, "Worker", Dying)
    kept, rejected = run(lj, "--address", ray_address, workers="1")
    assert len(kept) == 3 and reasons(rejected) == {"LJ001-0002.flac": "crashed"}
    assert "2 processes died of it" in rejected[0]["detail"]


# ---- what is refused before anything is done


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--asr-model", "/nowhere"], "/nowhere is not there"),
        (["--language", "Klingon"], "Qwen3-TTS speaks zh .Chinese., en"),
        (["--speaker-name", "a/b"], "a speaker can't be called 'a/b'"),
        (["--num-workers", "-1"], "--num-workers must be 0 or more"),
        (["--transcripts", "none.csv"], r"none\.csv is not a file"),
    ],
)
def test_wrong_settings_are_named_at_once(lj: Path, more: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        run(lj, *more)
    assert not (lj / "out").exists()


def test_consent_must_be_stated(lj: Path) -> None:
    with pytest.raises(SystemExit, match="--i-have-consent if anna agreed"):
        main(["--input-dir", str(lj / "in"), "--output-dir", str(lj / "out"), "--speaker-name", "Anna",
              "--num-workers", "0", "--transcripts", str(lj / "texts.csv")])  # fmt: skip
    assert not (lj / "out").exists()


def test_folders_without_recordings_are_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="in is not a folder"):
        run(tmp_path, "--asr-model", "small")
    (tmp_path / "in").mkdir()
    with pytest.raises(SystemExit, match=r"in holds no recordings \(.*\), nothing"):
        run(tmp_path, "--asr-model", "small")
    (tmp_path / "in" / "notes.txt").touch()
    with pytest.raises(SystemExit, match=r"only 1 \.txt"):
        run(tmp_path, "--asr-model", "small")


def test_speech_without_texts_or_a_recogniser_is_refused(lj: Path) -> None:
    (lj / "texts.csv").unlink()
    with pytest.raises(SystemExit, match="what is said must be known"):
        run(lj)


def test_an_output_of_other_recordings_is_not_mixed_up(lj: Path) -> None:
    run(lj)
    (lj / "in").rename(lj / "moved")
    with pytest.raises(SystemExit, match=r"holds the segments of .*in: give another --output-dir"):
        run(lj, "--input-dir", str(lj / "moved"))
    (lj / "moved").rename(lj / "in")
    shutil.rmtree(lj / "out")
    (lj / "out" / "segments").mkdir(parents=True)
    (lj / "out" / "segments" / "mine.wav").touch()
    with pytest.raises(SystemExit, match=r"process\.py did not write"):
        run(lj)
    assert (lj / "out" / "segments" / "mine.wav").exists()


def test_nothing_usable_ends_with_an_error_and_reasons(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    write_wav(tmp_path / "in" / "a.wav", np.zeros(SAMPLE_RATE_HZ, np.float32))
    (tmp_path / "texts.csv").write_text("id,text\na,Hello\n")
    with pytest.raises(SystemExit, match=r"nothing can be used: .*rejected\.jsonl"):
        run(tmp_path)
    assert reasons(read(tmp_path / "out" / "rejected.jsonl")) == {"a.wav": "silent"}
    assert (tmp_path / "out" / "report.html").is_file()


def test_nothing_usable_names_what_is_wrong_with_the_segments(
    speech: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").mkdir()
    for name in "ab":
        write_wav(tmp_path / "in" / f"{name}.wav", load_audio(speech / "lj" / "LJ001-0002.flac", 8000), 8000)
    (tmp_path / "texts.csv").write_text("id,text\na,in being\nb,in being\n")
    with pytest.raises(SystemExit, match="nothing can be used"):
        run(tmp_path)
    said = [line for line in capsys.readouterr().out.splitlines() if "narrow-band, " in line]
    assert (
        len(said) == 1 and said[0].startswith("a.wav: narrow-band, nothing above") and "--allow-narrow-band" in said[0]
    )


def test_several_speakers_under_one_name_are_refused(lj: Path) -> None:
    rows = (lj / "texts.csv").read_text().splitlines()
    named = [
        f"{rows[0]}|speaker",
        *(f"{row}|{who}" for row, who in zip(rows[1:], ["Eva", "Eva", "Tom", "Tom"], strict=True)),
    ]
    (lj / "texts.csv").write_text("\n".join(named) + "\n")
    with pytest.raises(
        SystemExit, match=r"names 2 speakers of these recordings \(eva, tom\).*--speaker-from transcripts"
    ):
        run(lj)
    kept, _ = run(lj, "--speaker-from", "transcripts", speaker=None)
    assert [row["speaker"] for row in kept] == ["eva", "eva", "tom", "tom"]


# ---- small things


def test_recordings_are_found_wherever_they_are_and_nothing_else(tmp_path: Path) -> None:
    for name in ("b.WAV", "x/a.mp3", "x/.hidden.wav", ".git/a.wav", "x/._a.mp3", "out/segments/s.wav", "notes.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    files, others = find_files(tmp_path, tmp_path / "out")
    assert [path.relative_to(tmp_path).as_posix() for path in files] == ["b.WAV", "x/a.mp3"]
    assert others == {".txt": 1}
    assert [path.name for path in find_files(tmp_path / "x", tmp_path)[0]] == ["a.mp3"]  # voice/recordings into voice
    with pytest.raises(ValueError, match="is --input-dir and --output-dir"):
        find_files(tmp_path, tmp_path)


def test_segments_of_recordings_of_one_name_are_told_apart() -> None:
    paths = [
        Path(name)
        for name in ("a.wav", "x/b.wav", "y/b.wav", "c d.wav", "e.mp3", "e.wav", "ü.wav", "f g/h.wav", "f_g/h.wav")
    ]
    names = segment_names(paths)
    assert len(set(names.values())) == len(paths)
    assert [names[Path(name)] for name in ("a.wav", "x/b.wav", "c d.wav", "e.mp3", "ü.wav")] == [
        "a", "x_b.wav", "c_d", "e.mp3", "ü"]  # fmt: skip


def test_who_speaks_is_known_or_asked_for() -> None:
    def asked(how: str, name: str | None = None) -> Asked:
        return Asked(Path("in"), Path("out"), None, name, how)

    row = Given("a", "Yes", "Tom", 1)
    assert speaker_of(Path("Eva/x/a.wav"), row, asked("folder")) == "eva"
    assert speaker_of(Path("a.wav"), row, asked("folder", "Ann")) == "ann"
    assert speaker_of(Path("Eva/a.wav"), row, asked("transcripts")) == "tom"
    for how in ("folder", "transcripts", "name"):
        with pytest.raises(ValueError, match="--speaker-name"):
            speaker_of(Path("a.wav"), None, asked(how))


@pytest.mark.parametrize("duration_s", [0.05, 0.3, 2.0])
def test_loudness_is_the_same_however_short(duration_s: float) -> None:
    draw = np.random.default_rng(0).normal(0, 0.01, int(duration_s * SAMPLE_RATE_HZ)).astype(np.float32)
    assert loudness_lufs(normalised(draw)) == pytest.approx(-23, abs=0.1)
    assert loudness_lufs(normalised(30 * draw)) == pytest.approx(-23, abs=0.1)


def test_loudness_gives_way_to_peaks_and_silence_stays() -> None:
    wav = np.full(SAMPLE_RATE_HZ, 1e-4, np.float32)
    wav[100] = 0.5
    assert np.abs(normalised(wav)).max() == pytest.approx(0.89, abs=1e-3)
    assert not normalised(np.zeros(100, np.float32)).any()
