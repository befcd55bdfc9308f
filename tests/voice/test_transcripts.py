"""Given texts are read in the forms people have them, matched to recordings, and timed by what Whisper hears."""

from __future__ import annotations

from pathlib import Path, PurePath
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("soxr", reason="needs keepstep[voice]")

import transcripts
from audio import load_audio
from segments import Word
from transcripts import (
    Given,
    OtherLanguage,
    Recogniser,
    TranscriptError,
    align,
    check_model,
    confidence,
    disagreement,
    match,
    read_transcripts,
    written_words,
)
from voice.recordings import recordings
from voice.whisper import whisper_base  # noqa: F401  a fixture


def read(tmp_path: Path, content: str, name: str = "texts.csv") -> list[tuple[str, str, str | None]]:
    (tmp_path / name).write_text(content, encoding="utf-8")
    return [(row.audio, row.text, row.speaker) for row in read_transcripts(tmp_path / name)]


# ---- reading


@pytest.mark.parametrize(
    ("content", "name"),
    [
        ('audio,text,speaker\na.wav,"Well, then.",Anna\nb.wav,Yes,\n', "t.csv"),
        ('\ufefffile;text;speaker\r\na.wav;"Well, then.";Anna\r\nb.wav;Yes;\r\n', "t.csv"),
        ("id|text|speaker\na.wav|Well, then.|Anna\nb.wav|Yes|\n\n", "t.txt"),
        ("file\ttext\tspeaker\na.wav\tWell, then.\tAnna\nb.wav\tYes\t\n", "t.tsv"),
        (
            '{"audio": "a.wav", "text": "Well,  then.", "speaker": "Anna"}\n\n{"id": "b.wav", "text": "Yes"}\n',
            "t.jsonl",
        ),
        (
            '{"file": "a.wav", "transcript": "Well, then.", "speaker": "Anna"}\n{"id": "b.wav", "text": "Yes"}\n',
            "t.txt",
        ),
    ],
)
def test_the_usual_forms_are_read(tmp_path: Path, content: str, name: str) -> None:
    assert read(tmp_path, content, name) == [("a.wav", "Well, then.", "Anna"), ("b.wav", "Yes", None)]


def test_lj_speech_has_no_header_and_the_spoken_text_last(tmp_path: Path) -> None:
    found = read(tmp_path, 'LJ1|In 1465, "he" said|In fourteen sixty-five, "he" said\nLJ2|Yes.|Yes.\n', "metadata.csv")
    assert found[0] == ("LJ1", 'In fourteen sixty-five, "he" said', None)
    assert read(tmp_path, "LJ1|Yes\nLJ2|No\n") == [("LJ1", "Yes", None), ("LJ2", "No", None)]


LJ_SPEECH = """\
LJ001-0001|Printing, in the only sense with which we are at present concerned, differs from most if not from all the \
arts and crafts represented in the Exhibition|Printing, in the only sense with which we are at present concerned, \
differs from most if not from all the arts and crafts represented in the Exhibition
LJ001-0002|in being comparatively modern.|in being comparatively modern.
LJ001-0003|For although the Chinese took impressions from wood blocks engraved in relief for centuries before the \
woodcutters of the Netherlands, by a similar process|For although the Chinese took impressions from wood blocks \
engraved in relief for centuries before the woodcutters of the Netherlands, by a similar process
LJ001-0007|the earliest book printed with movable types, the Gutenberg, or "forty-two line Bible" of about 1455,|the \
earliest book printed with movable types, the Gutenberg, or "forty-two line Bible" of about fourteen fifty-five,
LJ001-0008|has never been surpassed.|has never been surpassed.
"""
"""As its metadata.csv begins: more commas than | in the first line."""


def test_the_first_lines_of_lj_speech_are_read(tmp_path: Path) -> None:
    found = read(tmp_path, LJ_SPEECH, "metadata.csv")
    assert [audio for audio, _, _ in found] == [f"LJ001-000{k}" for k in (1, 2, 3, 7, 8)]
    assert found[0][1].startswith("Printing, in the only sense") and found[0][1].endswith("in the Exhibition")
    assert found[3][1].endswith('"forty-two line Bible" of about fourteen fifty-five,')


TEXTS = ("Well, then; go.", "One, two, three, four, five.", "Yes.", "No; never.", "He said, quite loudly, no.")


@pytest.mark.parametrize("delimiter", ["|", "\t", ";", ","])
@pytest.mark.parametrize("header", [(), ("file", "text")])
@pytest.mark.parametrize("num_texts", [2, 5])
def test_what_divides_a_file_is_found(tmp_path: Path, delimiter: str, header: tuple[str, ...], num_texts: int) -> None:
    def quoted(text: str) -> str:
        return f'"{text}"' if delimiter in ",;" else text

    expected = [(f"{number}.wav", text, None) for number, text in enumerate(TEXTS[:num_texts])]
    lines = [delimiter.join(header)] if header else []
    lines += [f"{audio}{delimiter}{quoted(text)}" for audio, text, _ in expected]
    assert read(tmp_path, "\n".join(lines) + "\n") == expected


@pytest.mark.parametrize("delimiter", ["|", "\t"])
def test_where_several_divide_alike_the_rarest_is_meant(tmp_path: Path, delimiter: str) -> None:
    content = f"a.wav{delimiter}Well, then; go.\nb.wav{delimiter}Yes, sir; no.\n"
    assert read(tmp_path, content) == [("a.wav", "Well, then; go.", None), ("b.wav", "Yes, sir; no.", None)]


def test_a_line_that_is_wrong_does_not_change_what_divides_the_file(tmp_path: Path) -> None:
    with pytest.raises(TranscriptError, match="line 4 has 4 fields, not 3: 'LJ001-0007"):
        read(tmp_path, LJ_SPEECH.replace(' "forty', '|"forty', 1))


def test_a_third_column_that_is_no_text_is_not_taken_for_it(tmp_path: Path) -> None:
    with pytest.raises(TranscriptError, match=r"line 1: its third field, 'anna', is far shorter.*audio\|text\|speaker"):
        read(tmp_path, "a.wav|Well, then, let us go.|anna\nb.wav|Yes, let us do that.|anna\n")


def test_the_real_metadata_is_read(speech: Path) -> None:
    rows = read_transcripts(speech / "metadata.csv")
    assert len(rows) == 404 and rows[0].audio == "lj/LJ001-0001" and rows[0].line == 2


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        (
            "audio,text\na.wav,Well, then.\n",
            "t.csv",
            r"line 2 has 3 fields, not 2: 'a.wav,Well,then.'.*quotation marks",
        ),
        ("audio,text\n,Yes\n", "t.csv", "line 2: it names no recording"),
        ("name,words\na.wav,Yes\n", "t.csv", "its first line is 'name,words', and one of audio, file, id"),
        ("name|words|who\na.wav|Yes|Anna\n", "t.csv", r"first line is 'name\|words\|who', and one of audio"),
        ("file|words\na.wav|Yes\n", "t.csv", "does not name its columns"),
        ("a.wav,Well, then.\nb.wav,Yes, sir.\n", "t.csv", "does not name its columns: .* 'a.wav,well,then.'"),
        ('audio,text\na.wav,"' + "Yes. " * 30_000, "t.csv", "is no CSV .*quotation mark left open"),
        ("just a line\n", "t.csv", "is no CSV"),
        ("", "t.csv", "is no CSV"),
        ("audio,text\n", "t.csv", "has no rows"),
        ('{"audio": "a.wav"\n', "t.jsonl", "line 1: .*one object a line"),
        ('{"audio": "a.wav", "text": 3}\n', "t.jsonl", "line 1: its text is 3, not a string"),
        ('{"audio": 5, "text": "Yes"}\n', "t.jsonl", "line 1: its audio is 5, not a string"),
        ('{"id": "a", "text": "Yes", "speaker": ["Anna"]}\n', "t.jsonl", r"its speaker is \['Anna'\], not a string"),
        ("[1]\n", "t.jsonl", "line 1: it is a list, not an object"),
    ],
)
def test_bad_files_are_named_with_the_line(tmp_path: Path, content: str, name: str, message: str) -> None:
    with pytest.raises(TranscriptError, match=message):
        read(tmp_path, content, name)


def test_speakers_may_be_numbers(tmp_path: Path) -> None:
    assert read(tmp_path, '{"id": "a", "text": "Yes", "speaker_id": 1089}\n', "t.jsonl") == [("a", "Yes", "1089")]


def test_of_many_bad_lines_some_are_named_and_all_are_counted(tmp_path: Path) -> None:
    with pytest.raises(TranscriptError, match=r"line 2.*line 6.* and 4 more"):
        read(tmp_path, "audio,text\n" + "a,b,c\n" * 9)


def test_what_is_no_text_or_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes("audio,text\na,größer\n".encode("latin-1"))
    with pytest.raises(TranscriptError, match="not UTF-8"):
        read_transcripts(tmp_path / "t.csv")
    with pytest.raises(TranscriptError, match="is not a file"):
        read_transcripts(tmp_path / "none.csv")


# ---- matching


def given(audio: str, text: str = "Yes", line: int = 1) -> Given:
    return Given(audio, text, None, line)


def test_rows_find_their_recordings_by_path_or_name() -> None:
    sources = [PurePath(name) for name in ("x/a.wav", "x/b.mp3", "y/b.mp3", "c.d.flac")]
    for name in ("x/a.wav", "x/a", "a.wav", "a", "/data/old/x/a.wav", "old\\x\\a.wav", "a.flac"):
        found, lost = match([given(name)], sources)
        assert list(found) == [PurePath("x/a.wav")] and not lost, name
    for name in ("c.d.flac", "c.d"):
        assert list(match([given(name)], sources)[0]) == [PurePath("c.d.flac")], name
    assert list(match([given("y/b")], sources)[0]) == [PurePath("y/b.mp3")]


def test_rows_that_fit_none_or_several_or_contradict_are_named() -> None:
    sources = [PurePath(name) for name in ("x/a.wav", "x/b.mp3", "y/b.mp3")]
    rows = [given("a", "One", 1), given("a", "Two", 2), given("a", "One", 3), given("b", line=4), given("z", line=5)]
    found, lost = match(rows, sources)
    assert found == {PurePath("x/a.wav"): rows[0]}
    assert [(row.line, why) for row, why in lost] == [
        (2, "a has another text already, on line 1, which is kept"),
        (4, "b fits 2 recordings: x/b.mp3, y/b.mp3; name the path"),
        (5, "z fits no recording"),
    ]


# ---- timing


@pytest.mark.parametrize("text", ["One, two - three!", " forty-five men", "我们去。Then home", "»Quoted« words …"])
def test_written_words_are_the_text(text: str) -> None:
    assert "".join(written_words(text)) == text
    assert all(word.strip() for word in written_words(text))


def test_scripts_without_spaces_have_words_too() -> None:
    assert written_words("我们去。Then home.") == ["我", "们", "去。", "Then", " home."]


def heard(*words: str) -> list[Word]:
    return [Word(f" {word}", float(k), k + 1.0) for k, word in enumerate(words)]


def test_given_words_get_the_times_of_the_same_words_heard() -> None:
    words = align("The year - 1465, forty-five men!", heard("the", "Year", "1465", "forty", "five", "men"))
    assert [(w.text, w.start_s, w.end_s) for w in words] == [
        ("The", 0, 1), (" year -", 1, 2), (" 1465,", 2, 3), (" forty-five", 3, 5), (" men!", 5, 6)]  # fmt: skip
    assert all(word.is_timed for word in words)


def test_words_that_were_not_heard_are_known_to_be_guesses() -> None:
    words = align("one two three four five", heard("one", "zwei", "three", "five"))
    assert "".join(word.text for word in words) == "one two three four five"
    assert [word.is_timed for word in words] == [True, False, True, False, True]
    assert (words[1].start_s, words[1].end_s) == (1.0, 2.0)
    assert words[3].start_s == words[3].end_s == 3.0


def test_a_text_of_something_else_is_all_guesses() -> None:
    words = align("nothing of it is here", heard("quite", "another", "matter"))
    assert not any(word.is_timed for word in words)
    assert [word.is_timed for word in align("alone", [])] == [False]


@pytest.mark.parametrize(
    ("text", "heard_as"),
    [
        ("In fourteen fifty-five.", "In 1455"),
        ("ENTER TWO NINE EIGHT ONE", "Enter 2981."),
        ("ENTER ONE OH FOUR", "Enter 104."),
        ("SEVENTY SEVEN SEVENTY SEVEN", "7777"),
        ("EIGHT THIRTEEN", "813"),
        ("TWELVE THIRTY THREE", "12.33"),
        ("EIGHT EIGHT FOUR THREE SIX FOUR EIGHT", "8-8-4-3648."),
    ],
)
def test_numbers_agree_however_they_are_read(text: str, heard_as: str) -> None:
    assert disagreement(text, heard_as) == 0.0


def test_other_words_do_not_agree() -> None:
    assert disagreement("Good morning to you all.", "I sold the car in 1998.") > 0.6
    assert disagreement("Good morning.", "") == 1.0


def test_the_least_sure_words_count() -> None:
    sure = [Word(" a", 0, 1, 0.9)] * 5
    assert confidence(sure) == pytest.approx(0.9)
    assert confidence([*sure, Word(" b", 5, 6, 0.1), Word(" c", 6, 7, 0.2)]) == pytest.approx(0.4)
    assert confidence(sure[:1]) == pytest.approx(0.9) and confidence([]) == 0.0


# ---- hearing


def test_models_that_are_none_are_named(tmp_path: Path) -> None:
    with pytest.raises(TranscriptError, match=r"lacks model\.bin and config\.json"):
        check_model(str(tmp_path))
    with pytest.raises(TranscriptError, match="is not there"):
        check_model(str(tmp_path / "none"))
    pytest.importorskip("faster_whisper", reason="needs keepstep[voice]")
    with pytest.raises(TranscriptError, match="the ASR model enormous can't be had"):
        check_model("enormous")


def hears(monkeypatch: pytest.MonkeyPatch, shares: dict[str, float]) -> Recogniser:
    """One that finds these languages."""
    model = SimpleNamespace(detect_language=lambda wav: (max(shares), 0.0, list(shares.items())))
    package = SimpleNamespace(WhisperModel=lambda *_, **__: model)
    monkeypatch.setattr(transcripts, "_whisper", lambda: package)
    return Recogniser("small")


def test_a_language_that_the_model_does_not_speak_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    polish = hears(monkeypatch, {"pl": 0.97, "cs": 0.02, "ru": 0.01})
    with pytest.raises(OtherLanguage, match=r"like Polish \(97%\).*Chinese, English.*Italian: 1% together.*--language"):
        polish.language(np.zeros(24_000, np.float32))


@pytest.mark.parametrize(
    ("shares", "language"),
    [
        ({"en": 0.98, "cy": 0.02}, "en"),
        ({"cy": 0.4, "en": 0.35, "de": 0.15, "nn": 0.1}, "en"),  # unsure, but more likely one of ours
        ({"ru": 0.6, "uk": 0.4}, "ru"),
    ],
)
def test_of_its_own_languages_the_likeliest_is_taken(
    monkeypatch: pytest.MonkeyPatch, shares: dict[str, float], language: str
) -> None:
    assert hears(monkeypatch, shares).language(np.zeros(24_000, np.float32)) == language


def test_words_are_heard_at_their_times(speech: Path, whisper_base: Path) -> None:  # noqa: F811
    check_model(str(whisper_base))
    recogniser = Recogniser(str(whisper_base))
    path, text = recordings(speech, "lj")[0]
    wav = load_audio(path)
    assert recogniser.language(wav) == "en"
    words = recogniser.words(wav, "en", start_s=100.0)
    assert words == recogniser.words(wav, "en", start_s=100.0)
    timed = {word.text.strip(" ,.").lower(): word.start_s for word in words}
    assert 100.0 <= timed["printing"] < 100.4
    assert timed["differs"] == pytest.approx(104.5, abs=0.2)  # after a pause of 0.3 s
    aligned = align(text, words)
    assert "".join(word.text for word in aligned) == text
    assert sum(word.is_timed for word in aligned) >= 0.9 * len(aligned)
