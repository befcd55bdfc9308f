"""Codes: right for every row, the same again, kept over kills; rows that cannot be encoded are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import prepare
import pytest
from audio import load_audio, write_wav
from prepare import Encoded, Task, encode_batch, main, plan_batches

ALONE = ("--num-workers", "0", "--device", "cpu")
FRAME = 1920


@pytest.fixture
def voice(tmp_path: Path, speech: Path) -> Path:
    """A work folder as process.py leaves it: six segments of two speakers, none a whole number of frames long."""
    folder = tmp_path / "voice"
    rows = []
    for number, path in enumerate(sorted((speech / "an4").glob("*.flac"))[:6]):
        wav = load_audio(path)[: -(500 + 37 * number)]
        speaker = "anna" if number < 3 else "ben"
        audio = f"segments/{speaker}/{path.stem}.wav"
        write_wav(folder / audio, wav)
        rows.append({"audio": audio, "text": f"Text {number}.", "speaker": speaker, "ref_audio": audio,
                     "language": "English", "duration_s": round(len(wav) / 24_000, 3), "source": "x.mp3"})  # fmt: skip
    write(folder, rows)
    return folder


def write(voice: Path, rows: list[dict[str, Any]]) -> None:
    (voice / "segments.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(voice: Path, model: Path, *more: str) -> list[dict[str, Any]]:
    main(["--segments", str(voice / "segments.jsonl"), "--output-dir", str(voice), "--model-path", str(model),
          *(more or ALONE)])  # fmt: skip
    return read(voice / "codes.jsonl")


def parts(voice: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((voice / "codes").glob("*"))}


def test_every_row_gets_the_codes_of_its_audio(voice: Path, tiny_model: Path) -> None:
    from qwen import load_codec

    given, rows = read(voice / "segments.jsonl"), run(voice, tiny_model)
    fields = ["audio", "text", "speaker", "ref_audio", "language", "duration_s"]
    assert [list(row) for row in rows] == [[*fields, "audio_codes"]] * 6
    assert [[row[name] for name in fields] for row in rows] == [[row[name] for name in fields] for row in given]
    codec = load_codec(str(tiny_model))
    for row in rows:
        (alone,) = codec.encode([load_audio(voice / row["audio"])])
        assert row["audio_codes"] == alone.tolist()
        assert len(row["audio_codes"]) == -(-load_audio(voice / row["audio"]).size // FRAME)


def test_padding_changes_no_codes(voice: Path, tiny_model: Path) -> None:
    from qwen import load_codec

    codec = load_codec(str(tiny_model))
    wavs = [load_audio(voice / row["audio"]) for row in read(voice / "segments.jsonl")]
    together, alone = codec.encode(wavs), [codec.encode([wav])[0] for wav in wavs]
    assert all(np.array_equal(one, other) for one, other in zip(together, alone, strict=True))
    # The codec as it comes does otherwise, in the last frame: this test sees it.
    as_it_comes = codec._tokenizer.encode(wavs, sr=24_000).audio_codes
    one_by_one = [codec._tokenizer.encode([wav], sr=24_000).audio_codes[0] for wav in wavs]
    assert not all(one.equal(other) for one, other in zip(as_it_comes, one_by_one, strict=True))


def test_the_same_again_writes_the_same_and_encodes_nothing(
    voice: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(voice, tiny_model)
    before, files = (voice / "codes.jsonl").read_bytes(), parts(voice)
    monkeypatch.setattr(prepare, "encode_batch", lambda *_: pytest.fail("it encodes again"))
    run(voice, tiny_model)
    assert (voice / "codes.jsonl").read_bytes() == before
    assert parts(voice) == files
    assert "6 have codes already" in capsys.readouterr().out


def test_a_killed_run_goes_on(voice: Path, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = (*ALONE, "--batch-seconds", "6")
    whole = run(voice, tiny_model, *few)
    again = tmp_path / "again"
    (voice / "codes.jsonl").unlink()
    voice.rename(again)
    for part in list((again / "codes").iterdir())[1:]:
        part.unlink()
    encoded: list[int] = []

    def counted(codec: Any, tasks: list[Task]) -> list[Encoded]:
        encoded.extend(task.number for task in tasks)
        if len(encoded) > 2:
            raise KeyboardInterrupt
        return encode_batch(codec, tasks)

    monkeypatch.setattr(prepare, "encode_batch", counted)
    with pytest.raises(KeyboardInterrupt):
        run(again, tiny_model, *few)
    assert not (again / "codes.jsonl").exists()
    monkeypatch.setattr(prepare, "encode_batch", encode_batch)
    assert run(again, tiny_model, *few) == whole
    assert len(encoded) == len(set(encoded)) < 6


def test_text_that_was_mended_and_rows_that_are_gone_need_no_codec(
    voice: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pyarrow.parquet as pq

    before = run(voice, tiny_model)
    rows = read(voice / "segments.jsonl")[1:]
    rows[0]["text"] = "Mended."
    write(voice, rows)
    monkeypatch.setattr(prepare, "encode_batch", lambda *_: pytest.fail("it encodes again"))
    after = run(voice, tiny_model)
    assert after == [before[1] | {"text": "Mended."}, *before[2:]]
    stored = [row for path in (voice / "codes").iterdir() for row in pq.read_table(path).to_pylist()]
    assert sorted(row["text"] for row in stored) == sorted(row["text"] for row in after)
    assert {row["text"]: row["audio_codes"] for row in stored} == {row["text"]: row["audio_codes"] for row in after}


def test_changed_audio_and_another_codec_are_encoded_anew(voice: Path, tiny_model: Path, tmp_path: Path) -> None:
    from tiny import build_tiny

    before = run(voice, tiny_model)
    path = voice / before[0]["audio"]
    write_wav(path, load_audio(path)[::-1].copy())
    changed = run(voice, tiny_model)
    assert changed[0]["audio_codes"] != before[0]["audio_codes"] and changed[1:] == before[1:]
    other = run(voice, build_tiny(tmp_path / "other", seed=1))
    assert all(one["audio_codes"] != two["audio_codes"] for one, two in zip(changed, other, strict=True))


def test_a_damaged_part_is_made_again(voice: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = run(voice, tiny_model)
    (part,) = (voice / "codes").iterdir()
    part.write_bytes(part.read_bytes()[:-100])
    assert run(voice, tiny_model) == before
    assert "cannot be read" in capsys.readouterr().out


def break_rows(voice: Path) -> dict[int, str]:
    """Breaks all rows but the last two; what is to be said of each."""
    rows = read(voice / "segments.jsonl")
    (voice / rows[0]["audio"]).unlink()
    (voice / rows[1]["audio"]).write_bytes(b"RIFF no audio at all")
    rows[2]["duration_s"] += 1.0
    write_wav(voice / rows[3]["audio"], np.zeros(24_000, np.float32))
    rows[3]["duration_s"] = 1.0
    rows = [*rows[:4], rows[4] | {"text": " "}, rows[4] | {"speaker": ""}, rows[4] | {"ref_audio": "gone.wav"}, rows[4]]
    rows[4:4] = [rows[7] | {"duration_s": "long"}]
    write(voice, [*rows, read(voice / "segments.jsonl")[5]])
    return {1: "not a file", 2: "can't be read", 3: "the row says", 4: "silence", 5: "no number", 6: "no text",
            7: "--speaker", 8: "gone.wav is not there"}  # fmt: skip


def test_rows_that_fail_are_named_and_the_others_made(
    voice: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = break_rows(voice)
    rows = run(voice, tiny_model)
    assert [row["text"] for row in rows] == ["Text 4.", "Text 5."]
    failed = {row["row"]: row["reason"] for row in read(voice / "failed.jsonl")}
    assert list(failed) == list(expected)
    for number, words in expected.items():
        assert words in failed[number]
    printed = capsys.readouterr().out
    assert "8 of 10 rows failed" in printed and "row 1: " in printed


def test_fields_of_another_kind_are_named_row_by_row(voice: Path, tiny_model: Path) -> None:
    rows = read(voice / "segments.jsonl")
    wrong: list[tuple[str, Any]] = [("audio", 5), ("text", 3.5), ("speaker", ["anna"]), ("ref_audio", {"a": 1}),
                                    ("language", 7), ("duration_s", float("nan")), ("duration_s", True)]  # fmt: skip
    write(voice, [*(rows[0] | {name: value} for name, value in wrong), rows[1] | {"speaker": 1089}])
    assert [row["speaker"] for row in run(voice, tiny_model)] == ["1089"]
    failed = [row["reason"] for row in read(voice / "failed.jsonl")]
    for (name, value), reason in zip(wrong[:5], failed[:5], strict=True):
        assert reason == f"its {name} is {value!r}, a string is expected"
    assert "the row says nan s" in failed[5] and "its duration_s is True, no number" in failed[6]


def test_failures_that_were_mended_are_forgotten(voice: Path, tiny_model: Path) -> None:
    whole = read(voice / "segments.jsonl")
    break_rows(voice)
    kept = {path: path.read_bytes() for path in voice.glob("segments/*/*.wav")}
    run(voice, tiny_model)
    write(voice, [row for row in whole if (voice / row["audio"]) in kept][3:])
    run(voice, tiny_model)
    assert not (voice / "failed.jsonl").exists()


def test_it_ends_with_an_error_if_every_row_fails_and_keeps_what_there_was(
    voice: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As when a disk is not mounted."""
    before, files = run(voice, tiny_model), parts(voice)
    (voice / "segments").rename(voice / "elsewhere")
    with pytest.raises(SystemExit) as ended:
        run(voice, tiny_model)
    assert ended.value.code == 1
    assert "every row failed" in capsys.readouterr().out
    assert len(read(voice / "failed.jsonl")) == 6
    assert read(voice / "codes.jsonl") == before and parts(voice) == files


def test_codes_that_are_there_do_not_hide_a_wrong_row(voice: Path, tiny_model: Path) -> None:
    run(voice, tiny_model)
    rows = read(voice / "segments.jsonl")
    write(voice, [rows[0], rows[0] | {"duration_s": rows[0]["duration_s"] + 1}, *rows[1:]])
    assert [row["text"] for row in run(voice, tiny_model)] == [row["text"] for row in rows]
    (failed,) = read(voice / "failed.jsonl")
    assert failed["row"] == 2 and "the row says" in failed["reason"]


def test_the_same_audio_in_two_rows_is_encoded_once(voice: Path, tiny_model: Path) -> None:
    rows = read(voice / "segments.jsonl")
    write(voice, [rows[0], rows[0] | {"text": "Another."}])
    one, two = run(voice, tiny_model)
    assert one["audio_codes"] == two["audio_codes"] and two["text"] == "Another."
    assert run(voice, tiny_model) == [one, two]


def test_a_forgotten_hour_is_named_before_it_is_read(voice: Path, tiny_model: Path) -> None:
    write_wav(voice / "long.wav", np.zeros(130 * 24_000, np.float32) + 0.1)
    write(voice, [{"audio": "long.wav", "text": "A", "speaker": "anna"}, read(voice / "segments.jsonl")[0]])
    run(voice, tiny_model)
    (failed,) = read(voice / "failed.jsonl")
    assert "130.0 s long, more than 120 s" in failed["reason"]


def test_audio_of_another_rate_is_resampled_and_that_is_said(
    voice: Path, tiny_model: Path, speech: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flac = sorted((speech / "an4").glob("*.flac"))[0]
    write(voice, [{"audio": str(flac), "text": "Of 16 kHz."}])
    (row,) = run(voice, tiny_model, *ALONE, "--speaker", "Anna")
    assert "resampled to 24,000 Hz: 1 of 16,000 Hz" in capsys.readouterr().out
    assert (row["speaker"], row["ref_audio"], row["language"]) == ("anna", str(flac), "auto")
    assert len(row["audio_codes"]) == -(-load_audio(flac).size // FRAME)
    assert row["duration_s"] == pytest.approx(load_audio(flac).size / 24_000, abs=1e-3)


def test_codes_that_cannot_be_are_a_reason_not_a_row(voice: Path, tiny_model: Path) -> None:
    from qwen import load_codec

    codec = load_codec(str(tiny_model))
    row = read(voice / "segments.jsonl")[0]
    task = Task(1, str(voice / row["audio"]), "key", row["duration_s"], 24_000)
    right = codec.encode([load_audio(task.audio)])[0]
    for wrong, words in (
        (right[:-1], "frames"),
        (right[:, :8], "of 8 codes"),
        (right + codec.codebook_size, "outside its codebook"),
    ):
        codec.encode = lambda wavs, wrong=wrong: [wrong]  # type: ignore[method-assign]
        (done,) = encode_batch(codec, [task])
        assert not done.codes and words in done.reason


def test_a_batch_that_fails_is_tried_row_by_row(voice: Path, tiny_model: Path) -> None:
    from qwen import load_codec

    codec = load_codec(str(tiny_model))
    rows = read(voice / "segments.jsonl")[:3]
    tasks = [Task(n, str(voice / row["audio"]), str(n), row["duration_s"], 24_000) for n, row in enumerate(rows, 1)]
    encode, bad = codec.encode, load_audio(tasks[1].audio)

    def breaks(wavs: list[Any]) -> list[Any]:
        if any(np.array_equal(wav, bad) for wav in wavs):
            raise RuntimeError("CUDA out of memory\nand more")
        return encode(wavs)

    codec.encode = breaks  # type: ignore[method-assign]
    done = {each.number: each for each in encode_batch(codec, tasks)}
    assert [done[number].reason[:20] for number in (1, 2, 3)] == ["", "the codec failed on ", ""]
    assert "CUDA out of memory)" in done[2].reason


def test_batches_hold_no_more_padded_audio_than_allowed() -> None:
    lengths = np.random.default_rng(0).uniform(1, 15, 200)
    tasks = [Task(number, "", "", float(length), 24_000) for number, length in enumerate(lengths)]
    batches = plan_batches(tasks, 60)
    assert sorted(task.number for batch in batches for task in batch) == list(range(200))
    padded = [len(batch) * max(task.duration_s for task in batch) for batch in batches]
    assert max(padded) <= 60
    assert sum(padded) < 1.2 * lengths.sum()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["--segments", "none.jsonl"], "none.jsonl is not there"),
        (["--model-path", "/no/such"], "/no/such is not there"),
        (["--batch-seconds", "0"], "--batch-seconds"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line(voice: Path, tiny_model: Path, change: list[str], words: str) -> None:
    with pytest.raises(SystemExit, match=words) as ended:
        run(voice, tiny_model, *ALONE, *change)
    assert "\n" not in str(ended.value)


@pytest.mark.ray
def test_workers_give_the_codes_that_one_process_gives(voice: Path, tiny_model: Path, ray_address: str) -> None:
    expected = run(voice, tiny_model)
    for path in (voice / "codes").iterdir():
        path.unlink()
    (voice / "codes.jsonl").unlink()
    (voice / expected[1]["audio"]).rename(voice / "elsewhere.wav")
    more = ("--num-workers", "2", "--batch-seconds", "8", "--address", ray_address, "--device", "cpu")
    assert run(voice, tiny_model, *more) == [row for number, row in enumerate(expected) if number != 1]
    assert [row["row"] for row in read(voice / "failed.jsonl")] == [2]
