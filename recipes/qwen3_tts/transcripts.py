"""What is said in a recording: read from a user's CSV or JSONL file, or heard by Whisper with the time of each word."""

from __future__ import annotations

import csv
import io
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import soxr
from audio import SAMPLE_RATE_HZ, Wav
from segments import Word
from spoken import compare, spoken_form

AUDIO_COLUMNS = ("audio", "file", "id", "path", "filename", "file_name", "audio_filepath")
TEXT_COLUMNS = ("text", "transcript", "sentence", "transcription")
SPEAKER_COLUMNS = ("speaker", "speaker_id", "speaker_name")
DELIMITERS = ("|", "\t", ",", ";")
MAX_NAMED = 5
"""Bad lines named in one message: enough to see what is wrong with a file."""

WHISPER_RATE_HZ = 16_000
LANGUAGES = {
    "zh": "Chinese",
    "en": "English",
    "ja": "Japanese",
    "ko": "Korean",
    "de": "German",
    "fr": "French",
    "ru": "Russian",
    "pt": "Portuguese",
    "es": "Spanish",
    "it": "Italian",
}
"""Those of Qwen3-TTS, by Whisper's letters. Rows carry the names, which Qwen3-TTS takes."""
AUTO = "Auto"
"""The language is left to the model."""


class TranscriptError(ValueError):
    """A transcript file or a recogniser that can't be used; the message says why and what to do."""


# ---- given texts


@dataclass(frozen=True)
class Given:
    """A row of a transcript file."""

    audio: str
    """As it is written there: a path or an id."""
    text: str
    speaker: str | None
    line: int


def read_transcripts(path: str | Path) -> list[Given]:
    """The rows of a JSONL file, or of a CSV file with `,`, `|`, `;` or tabs: with a header line, or as LJ Speech is."""
    path = Path(path)
    if not path.is_file():
        raise TranscriptError(f"{path} is not a file: --transcripts takes a CSV or JSONL file")
    try:
        content = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise TranscriptError(f"{path} is not UTF-8 text ({error}): save it as UTF-8") from error
    if path.suffix.lower() in (".jsonl", ".json", ".ndjson") or content.lstrip().startswith("{"):
        rows = _json_rows(path, content)
    else:
        rows = _csv_rows(path, content)
    if not rows:
        raise TranscriptError(f"{path} has no rows")
    return rows


def _json_rows(path: Path, content: str) -> list[Given]:
    rows, bad = [], []
    for number, line in enumerate(content.split("\n"), 1):
        if not line.strip():
            continue
        try:
            rows.append(_given(json.loads(line), number))
        except (ValueError, AttributeError) as error:
            bad.append(f"line {number}: {error}")
    _raise_bad(path, bad, 'one object a line, as {"audio": "a.wav", "text": "what is said"}')
    return rows


def _csv_rows(path: Path, content: str) -> list[Given]:
    first = next((line for line in content.splitlines() if line.strip()), "")
    delimiter = max(DELIMITERS, key=first.count)
    if delimiter not in first:
        raise TranscriptError(f"{path} is no CSV: its first line has none of | , ; or tab: {first[:60]!r}")
    # With | nobody quotes, and texts hold quotation marks of their own; with commas quoting is what makes it work.
    quoting = csv.QUOTE_NONE if delimiter in "|\t" else csv.QUOTE_MINIMAL
    reader = csv.reader(
        io.StringIO(content, newline=""),
        delimiter=delimiter,
        quoting=quoting,
        skipinitialspace=quoting == csv.QUOTE_MINIMAL,
    )
    header: list[str] | None = None
    rows, bad = [], []
    for cells in reader:
        number = reader.line_num
        if not any(cell.strip() for cell in cells):
            continue
        if header is None:
            header = [cell.strip().lower() for cell in cells]
            if set(header) & set(AUDIO_COLUMNS) and set(header) & set(TEXT_COLUMNS):
                continue
            if delimiter != "|":
                raise TranscriptError(
                    f"{path} names its columns {', '.join(header)[:80]}: one of {', '.join(AUDIO_COLUMNS[:3])} and one"
                    f" of {', '.join(TEXT_COLUMNS[:2])} are expected"
                )
            # LJ Speech: no header, id|text|text with numbers written out, which says better what is heard.
            header = ["id", "text"] if len(cells) == 2 else ["id", "raw", "text"]
        if len(cells) != len(header):
            bad.append(f"line {number} has {len(cells)} fields, not {len(header)}: {delimiter.join(cells)[:50]!r}")
            continue
        try:
            rows.append(_given(dict(zip(header, cells, strict=True)), number))
        except ValueError as error:
            bad.append(f"line {number}: {error}")
    _raise_bad(
        path, bad, f'"{delimiter}" between fields, and quotation marks around a text with commas' * (delimiter == ",")
    )
    return rows


def _given(row: dict[str, Any], line: int) -> Given:
    lower = {str(key).lower(): value for key, value in row.items()}
    audio, text, speaker = (
        next((lower[name] for name in names if lower.get(name) not in (None, "")), None)
        for names in (AUDIO_COLUMNS, TEXT_COLUMNS, SPEAKER_COLUMNS)
    )
    if not isinstance(audio, str):
        raise ValueError(f"it names no recording: {', '.join(AUDIO_COLUMNS[:3])} is empty or missing")
    if text is not None and not isinstance(text, str):
        raise ValueError(f"its text is a {type(text).__name__}, not a string")
    return Given(audio.strip(), " ".join((text or "").split()), str(speaker).strip() if speaker else None, line)


def _raise_bad(path: Path, bad: Sequence[str], expected: str) -> None:
    if bad:
        more = f" and {len(bad) - MAX_NAMED} more" if len(bad) > MAX_NAMED else ""
        wanted = f". Expected: {expected}" if expected else ""
        raise TranscriptError(f"{path}: {'; '.join(bad[:MAX_NAMED])}{more}{wanted}")


def match(rows: Iterable[Given], sources: Sequence[PurePath]) -> tuple[dict[PurePath, Given], list[tuple[Given, str]]]:
    """Which row belongs to which source (paths below the input folder), and rows that belong to none, with why.

    A row may name the path, the path without its suffix, or the bare name if only one source has it.
    """
    by_name: dict[str, set[PurePath]] = defaultdict(set)
    for source in sources:
        for name in (source.as_posix(), source.with_suffix("").as_posix(), source.name, source.stem):
            by_name[name].add(source)
    found: dict[PurePath, Given] = {}
    lost = []
    for row in rows:
        name = PurePath(row.audio.replace("\\", "/"))
        ways = (name.as_posix(), *("/".join(name.parts[k:]) for k in range(1, len(name.parts))), name.stem)
        candidates = next((by_name[way] for way in ways if way in by_name), set())
        if len(candidates) > 1:
            lost.append((row, f"{row.audio} fits {len(candidates)} recordings: {_some(candidates)}; name the path"))
            continue
        if not candidates:
            lost.append((row, f"{row.audio} fits no recording"))
            continue
        source = next(iter(candidates))
        if source in found and found[source].text != row.text:
            lost.append((row, f"{row.audio} has another text already, on line {found[source].line}, which is kept"))
        else:
            found.setdefault(source, row)
    return found, lost


def _some(paths: Iterable[PurePath]) -> str:
    return ", ".join(sorted(path.as_posix() for path in paths)[:3])


# ---- heard texts


def check_model(model: str) -> None:
    """Raises at once for a folder that is no faster-whisper model; one that is named by its size is downloaded."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        if missing := [name for name in ("model.bin", "config.json") if not (folder / name).is_file()]:
            raise TranscriptError(
                f"{folder} lacks {' and '.join(missing)}: --asr-model takes a folder of a faster-whisper (CTranslate2)"
                " model, or a size as tiny, base, small, medium, large-v3"
            )
        return
    if model.startswith((".", "/", "~")):
        raise TranscriptError(f"{folder} is not there: --asr-model takes a folder of a faster-whisper model, or a size")
    _whisper()
    from faster_whisper.utils import download_model

    try:
        download_model(model)
    except Exception as error:  # the hub's exceptions share no base, and a wrong name is a ValueError
        why = str(error).strip().splitlines()[0].rstrip(".")
        raise TranscriptError(f"the ASR model {model} can't be had: {why}. Give a folder with --asr-model") from error


def _whisper() -> Any:
    try:
        import faster_whisper
    except ImportError as error:
        raise TranscriptError(f"faster-whisper can't be imported ({error}): pip install 'keepstep[voice]'") from error
    return faster_whisper


class Recogniser:
    """Whisper by faster-whisper, loaded once, made repeatable: no sampling, no memory of what was heard before."""

    def __init__(self, model: str, device: str = "cpu", num_threads: int = 1) -> None:
        folder = Path(model).expanduser()
        try:
            self._model = _whisper().WhisperModel(
                str(folder) if folder.is_dir() else model,
                device=device,
                compute_type="int8" if device == "cpu" else "float16",
                cpu_threads=num_threads,
            )
        except TranscriptError:
            raise
        except Exception as error:  # CTranslate2 raises plain RuntimeErrors, the hub its own
            raise TranscriptError(f"the ASR model {model} can't be loaded: {error}") from error

    def language(self, wav: Wav) -> str:
        """The letters of the language spoken in `wav` (SAMPLE_RATE_HZ), of those that Qwen3-TTS speaks."""
        _, _, ranked = self._model.detect_language(_for_whisper(wav))
        return max(((letters, share) for letters, share in ranked if letters in LANGUAGES), key=lambda pair: pair[1])[0]

    def words(self, wav: Wav, language: str, start_s: float = 0.0) -> list[Word]:
        """The words of `wav` (SAMPLE_RATE_HZ), at their times plus `start_s`."""
        pieces, _ = self._model.transcribe(
            _for_whisper(wav),
            language=language,
            beam_size=5,
            temperature=0.0,  # the higher ones, tried when in doubt, are drawn at random
            condition_on_previous_text=False,
            word_timestamps=True,
        )
        return [
            Word(word.word, start_s + float(word.start), start_s + float(word.end), float(word.probability))
            for piece in pieces
            for word in piece.words or ()
        ]


def confidence(words: Sequence[Word]) -> float:
    """How sure the recogniser is where it is least so: the mean probability of the weakest three words in a row."""
    probabilities = [word.probability for word in words]
    runs = [probabilities[k : k + 3] for k in range(max(1, len(probabilities) - 2))]
    return min(float(np.mean(run)) for run in runs) if probabilities else 0.0


def disagreement(text: str, heard: str) -> float:
    """The share of letters in which two texts differ when spoken; of the ways to read 1455 the nearest counts."""
    return min(compare(text, way).cer for way in sorted({heard, *(_read_digits(heard, *how) for how in _READINGS)}))


_READINGS = ((1, "0"), (1, " oh "), (2, "0"), (2, " oh "))
"""Digits one by one or in pairs, zero as zero or as oh."""


def _read_digits(text: str, at_once: int, zero: str) -> str:
    def read(found: re.Match[str]) -> str:
        digits = re.sub(r"\D", "", found[0])
        first = len(digits) % at_once or at_once
        groups = [digits[:first], *(digits[k : k + at_once] for k in range(first, len(digits), at_once))]
        return " " + " ".join(zero if group == "0" else group for group in groups) + " "

    return re.sub(r"\d+(?:[-.,:]\d+)*", read, text)


def _for_whisper(wav: Wav) -> Wav:
    return np.asarray(soxr.resample(wav, SAMPLE_RATE_HZ, WHISPER_RATE_HZ), np.float32)


# ---- given texts at heard times

# Scripts written without spaces: each of their characters is a word.
_ALONE = r"\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WRITTEN = re.compile(rf"\s*(?:[{_ALONE}]|[^\s{_ALONE}]+)[^\w\s]*")


def written_words(text: str) -> list[str]:
    """The words of a text as they are written, each with the space before it: joined they are the text again."""
    words: list[str] = []
    for written in _WRITTEN.findall(text):
        if words and not spoken_form(written):  # a dash that stands alone
            words[-1] += written
        else:
            words.append(written)
    return words


def align(text: str, heard: Sequence[Word]) -> list[Word]:
    """The words of a given text, timed by those that were heard alike; the others are marked as not timed."""
    written = written_words(text)
    said, said_in = _spoken_words(written)
    found, found_in = _spoken_words([word.text for word in heard])
    times: dict[int, list[Word]] = defaultdict(list)
    for a, b, size in SequenceMatcher(None, said, found, autojunk=False).get_matching_blocks():
        for k in range(size):
            times[said_in[a + k]].append(heard[found_in[b + k]])
    words: list[Word | None] = []
    for index, word in enumerate(written):
        alike = times[index]
        # "forty-five" is two spoken words: timed if both were heard.
        is_whole = alike and len(alike) == said_in.count(index)
        probability = min((w.probability for w in alike), default=0.0)
        words.append(Word(word, alike[0].start_s, alike[-1].end_s, probability) if is_whole else None)
    return _filled(written, words, heard)


def _spoken_words(written: Sequence[str]) -> tuple[list[str], list[int]]:
    """All words as they are spoken, and which of the written ones each comes from."""
    pairs = [(spoken, index) for index, word in enumerate(written) for spoken in spoken_form(word).split()]
    return [spoken for spoken, _ in pairs], [index for _, index in pairs]


def _filled(written: Sequence[str], words: Sequence[Word | None], heard: Sequence[Word]) -> list[Word]:
    """Words without a time share the room between those that have one."""
    start_s = heard[0].start_s if heard else 0.0
    end_s = heard[-1].end_s if heard else 0.0
    filled: list[Word] = []
    for index, word in enumerate(words):
        if word is None:
            before = filled[-1].end_s if filled else start_s
            upcoming = next((k for k in range(index, len(words)) if words[k] is not None), len(words))
            following = words[upcoming] if upcoming < len(words) else None
            room_s = max(0.0, (following.start_s if following else end_s) - before) / (upcoming - index)
            word = Word(written[index], before, before + room_s, probability=0.0, is_timed=False)
        filled.append(word)
    return filled
