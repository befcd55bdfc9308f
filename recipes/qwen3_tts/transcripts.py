"""What is said in a recording: read from a user's CSV or JSONL file, or heard by Whisper with the time of each word."""

from __future__ import annotations

import csv
import io
import json
import re
from collections import Counter, defaultdict
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
DELIMITERS = ("\t", "|", ";", ",")
"""What texts rarely hold comes first: where two divide a file alike, it is meant."""
NUM_LOOKED_AT = 100
"""So many first lines tell what divides a file."""
UNNAMED_COLUMNS = {2: ("id", "text"), 3: ("id", "raw", "text")}
"""Of files without a header. LJ Speech's third is its second with numbers written out: it says better what is heard."""
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
LEAST_SHARE = 0.5
"""Of LANGUAGES together, by the recogniser: with less it is more likely that none of them is spoken."""


class TranscriptError(ValueError):
    """A transcript file or a recogniser that can't be used; the message says why and what to do."""


class OtherLanguage(ValueError):
    """Speech in a language that Qwen3-TTS does not speak; the message says in which, and what to do."""


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
    """The rows of a JSONL file, or of a CSV file with `,`, `|`, `;` or tabs, with a header line or without."""
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
        try:
            rows = _csv_rows(path, content)
        except csv.Error as error:
            raise TranscriptError(f"{path} is no CSV ({error}): is a quotation mark left open?") from error
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
        except ValueError as error:
            bad.append(f"line {number}: {error}")
    _raise_bad(path, bad, 'one object a line, as {"audio": "a.wav", "text": "what is said"}')
    return rows


def _csv_rows(path: Path, content: str) -> list[Given]:
    delimiter = _delimiter(path, content)
    reader = _reader(io.StringIO(content, newline=""), delimiter)
    header: Sequence[str] = ()
    rows, bad = [], []
    for cells in reader:
        number = reader.line_num
        if not any(cell.strip() for cell in cells):
            continue
        if not header:
            names = [cell.strip().lower() for cell in cells]
            if set(names) & set(AUDIO_COLUMNS) and set(names) & set(TEXT_COLUMNS):
                header = names
                continue
            header = _unnamed_columns(path, names, delimiter)
        if len(cells) != len(header):
            bad.append(f"line {number} has {len(cells)} fields, not {len(header)}: {delimiter.join(cells)[:50]!r}")
            continue
        row = dict(zip(header, cells, strict=True))
        if header is UNNAMED_COLUMNS[3] and 0 < len(row["text"]) < len(row["raw"]) / 2:
            third = f"its third field, {row['text'][:20]!r}, is far shorter than its second and so not what is said"
            bad.append(f"line {number}: {third}; name the columns in a first line, as audio|text|speaker")
            continue
        try:
            rows.append(_given(row, number))
        except ValueError as error:
            bad.append(f"line {number}: {error}")
    _raise_bad(
        path, bad, f'"{delimiter}" between fields, and quotation marks around a text with commas' * (delimiter == ",")
    )
    return rows


def _delimiter(path: Path, content: str) -> str:
    """What divides most of the first lines into as many fields each: texts hold commas, too, but now two, now none."""
    lines = [line for line in content.splitlines() if line.strip()][:NUM_LOOKED_AT]
    num_alike = {delimiter: _num_alike(lines, delimiter) for delimiter in DELIMITERS}
    if not any(num_alike.values()):
        first = lines[0] if lines else ""
        raise TranscriptError(f"{path} is no CSV: its first line has none of | , ; or tab: {first[:60]!r}")
    return max(DELIMITERS, key=lambda delimiter: num_alike[delimiter])


def _num_alike(lines: Sequence[str], delimiter: str) -> int:
    """How many lines have the most common number of fields."""
    widths = Counter(len(cells) for line in lines for cells in _reader([line], delimiter) if len(cells) > 1)
    return max(widths.values(), default=0)


def _reader(lines: Iterable[str], delimiter: str) -> Any:
    # With | nobody quotes, and texts hold quotation marks of their own; with commas quoting is what makes it work.
    is_quoted = delimiter in ",;"
    quoting = csv.QUOTE_MINIMAL if is_quoted else csv.QUOTE_NONE
    return csv.reader(lines, delimiter=delimiter, quoting=quoting, skipinitialspace=is_quoted)


def _unnamed_columns(path: Path, first: Sequence[str], delimiter: str) -> Sequence[str]:
    """The columns of a file whose first line is a row already; an error where it is a header of other names."""
    known = {*AUDIO_COLUMNS, *TEXT_COLUMNS, *SPEAKER_COLUMNS}
    is_header = known & set(first) or all(re.fullmatch(r"[a-z_]+", name) for name in first)
    # With , and ; a third field is more likely a text's own comma, and the text would be cut there.
    if is_header or len(first) not in ((2, 3) if delimiter in "|\t" else (2,)):
        raise TranscriptError(
            f"{path} does not name its columns: its first line is {delimiter.join(first)[:80]!r}, and one of"
            f" {', '.join(AUDIO_COLUMNS[:3])} and one of {', '.join(TEXT_COLUMNS[:2])} are expected in it"
        )
    return UNNAMED_COLUMNS[len(first)]


def _given(row: object, line: int) -> Given:
    if not isinstance(row, dict):
        raise ValueError(f"it is a {type(row).__name__}, not an object")
    lower = {str(key).lower(): value for key, value in row.items()}
    audio, text, speaker = (_field(lower, names) for names in (AUDIO_COLUMNS, TEXT_COLUMNS, SPEAKER_COLUMNS))
    if audio is None:
        raise ValueError(f"it names no recording: {', '.join(AUDIO_COLUMNS[:3])} is empty or missing")
    return Given(audio.strip(), " ".join((text or "").split()), speaker.strip() if speaker else None, line)


def _field(row: dict[str, Any], names: Sequence[str]) -> str | None:
    """The first of these columns that holds something."""
    name = next((name for name in names if row.get(name) not in (None, "")), None)
    value = row[name] if name else None
    if names is SPEAKER_COLUMNS and type(value) is int:  # many corpora number their speakers
        return str(value)
    if not isinstance(value, str | None):
        raise ValueError(f"its {name} is {value!r}, not a string")
    return value


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
        """The letters of the language spoken in `wav` (SAMPLE_RATE_HZ); OtherLanguage if Qwen3-TTS speaks it not."""
        _, _, ranked = self._model.detect_language(_for_whisper(wav))
        shares = dict(ranked)
        of_ours = {letters: shares.get(letters, 0.0) for letters in LANGUAGES}
        if (together := sum(of_ours.values())) < LEAST_SHARE:
            likeliest = max(shares, key=lambda letters: shares[letters])
            raise OtherLanguage(
                f"it sounds like {_language_name(likeliest)} ({shares[likeliest]:.0%}), hardly like one that Qwen3-TTS"
                f" speaks ({', '.join(LANGUAGES.values())}: {together:.0%} together); if it is one of them, say"
                " which with --language"
            )
        return max(of_ours, key=lambda letters: of_ours[letters])

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


def _language_name(letters: str) -> str:
    """Of any that Whisper knows: faster-whisper has their letters alone."""
    from transformers.models.whisper.tokenization_whisper import LANGUAGES as NAMES

    return NAMES.get(letters, letters).capitalize()


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
