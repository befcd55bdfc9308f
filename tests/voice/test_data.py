"""Rows with codes: checked, divided by text, each speaker in a place of its own."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from data import Limits, load_utterances, speaker_ids, split_by_text
from rows import read_rows, write_rows

LIMITS = Limits(num_codebooks=16, codebook_size=64)


def changed(codes_file: Path, folder: Path, **fields: Any) -> Path:
    """The rows with the third one changed."""
    rows = read_rows(codes_file)
    rows[2] |= fields
    write_rows(folder / "codes.jsonl", rows)
    return folder / "codes.jsonl"


def test_speakers_are_chosen_and_lower_cased(codes_file: Path) -> None:
    assert {row["speaker"] for row in load_utterances(codes_file, LIMITS)} == {"anna", "bert"}
    rows = load_utterances(codes_file, LIMITS, ["BERT"])
    assert len(rows) == 12 and {row["speaker"] for row in rows} == {"bert"}
    with pytest.raises(ValueError, match="has no rows of clara; its speakers are anna, bert"):
        load_utterances(codes_file, LIMITS, ["Clara"])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"audio_codes": [[64] * 16]},
            "row 3 .* codes from 64 to 64, but the model has 0 to 63: they are another codec's",
        ),
        ({"audio_codes": [[1] * 8]}, r"codes of shape \[1, 8\], expected \[frames\]\[16\]"),
        ({"audio_codes": []}, r"codes of shape \[0\]"),
        ({"text": ""}, "line 3 lacks text"),
    ],
)
def test_a_bad_row_is_named(codes_file: Path, tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_utterances(changed(codes_file, tmp_path, **fields), LIMITS)


def test_a_line_that_is_no_row_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"audio": "a.wav", "text": "x"}) + "\n{broken\n")
    with pytest.raises(ValueError, match="line 2 is no JSON"):
        read_rows(path)
    with pytest.raises(ValueError, match="is not there: it is written by the stage before"):
        read_rows(tmp_path / "other.jsonl")


def test_paths_are_relative_to_their_file_so_that_the_folder_moves(tmp_path: Path) -> None:
    write_rows(tmp_path / "one" / "rows.jsonl", [{"audio": str(tmp_path / "one" / "a.wav"), "text": "x"}])
    assert '"a.wav"' in (tmp_path / "one" / "rows.jsonl").read_text()
    (tmp_path / "one").rename(tmp_path / "two")
    assert read_rows(tmp_path / "two" / "rows.jsonl")[0]["audio"] == str(tmp_path / "two" / "a.wav")


def test_a_text_is_on_one_side_only_whoever_says_it() -> None:
    rows = [{"text": f"Text {n}{mark}", "speaker": who} for n in range(40) for who, mark in (("a", "."), ("b", "!"))]
    train, held_out = split_by_text(rows, 0.1)
    assert len(held_out) == 8 and len(train) == 72
    assert not {row["text"][:-1] for row in train} & {row["text"][:-1] for row in held_out}
    assert split_by_text(rows[::-1], 0.1)[1] == held_out[::-1]  # the text alone decides
    assert split_by_text(rows, 0.0) == (rows, [])


def test_speakers_have_places_that_nobody_uses() -> None:
    talker = SimpleNamespace(code_predictor_config=SimpleNamespace(vocab_size=2048), vocab_size=3072)
    config = SimpleNamespace(talker_config=talker)
    assert speaker_ids(["bert", "anna"], config) == {"anna": 3000, "bert": 3001}
    with pytest.raises(ValueError, match="73 speakers, but the model has room for 72"):
        speaker_ids([str(number) for number in range(73)], config)
