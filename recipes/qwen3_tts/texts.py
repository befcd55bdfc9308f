"""Texts to say: read from a file, with words in them, in letters that the languages of Qwen3-TTS are written in."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from rows import Row, read_rows
from transcripts import LANGUAGES

_SCRIPTS = ("LATIN", "CYRILLIC", "CJK", "HIRAGANA", "KATAKANA", "HANGUL")
"""As Unicode's names of letters begin."""
_ALPHABETS = frozenset(
    "abcdefghijklmnopqrstuvwxyz"
    "äöüß"  # German
    "àâæçèéêëîïôœùûüÿ"  # French
    "àèéìíîòóùú"  # Italian
    "àáâãçéêíóôõúü"  # Portuguese
    "áéíñóúü"  # Spanish
    + "".join(map(chr, range(0x430, 0x450)))  # Russian, and its yo
    + "\u0451"
)


def check_text(text: str) -> str:
    """The text without the space around it; ValueError if there is nothing in it that the model could say."""
    if not any(character.isalnum() for character in text):
        raise ValueError(f"there is nothing to say in the text {text!r}: give words")
    scripts = Counter(script for _, script in _letters(text))
    foreign = Counter({script: count for script, count in scripts.items() if script not in _SCRIPTS})
    # A few letters are no language: a text may well name an angle alpha.
    if 2 * foreign.total() > scripts.total():
        ((script, _),) = foreign.most_common(1)
        shown = text if len(text) <= 60 else f"{text[:60]}..."
        raise ValueError(
            f"the text {shown!r} is written in {script.title()} letters, which Qwen3-TTS does not speak: give one in "
            f"{', '.join(LANGUAGES.values())}"
        )
    return text.strip()


def strange_letters(texts: Iterable[str]) -> str:
    """A warning if they have Latin or Cyrillic letters that none of the languages has; '' if not. Names have such."""
    found = {
        letter
        for text in texts
        for letter, script in _letters(text)
        if script in ("LATIN", "CYRILLIC") and letter.lower() not in _ALPHABETS
    }
    letters = ", ".join(sorted(found))
    return f"no language of Qwen3-TTS has the letters {letters}: words with them may be said wrong" if found else ""


def _letters(text: str) -> Iterator[tuple[str, str]]:
    """Each letter and its script. Letters in the shape of signs, as of a width or in mathematics, are plain ones."""
    for character in unicodedata.normalize("NFKC", text):
        # Not those that only modify others, as the apostrophe of Ukrainian or Japanese's mark for a long vowel.
        if unicodedata.category(character) in ("Lu", "Ll", "Lt", "Lo"):
            yield character, unicodedata.name(character, "unknown").partition(" ")[0]


# ---- files of them


def read_texts(path: Path) -> list[Row]:
    """A text a line, or JSONL rows."""
    if not path.is_file():
        raise ValueError(f"{path} is not there: give a text a line, or JSONL rows with text")
    if path.suffix.lower() in (".jsonl", ".json"):
        return read_rows(path, needed=("text",))
    rows = [{"text": line.strip()} for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not rows:
        raise ValueError(f"{path} has no texts")
    return rows


def texts_to_say(given: list[Row], path: Path, language: str, speaker: str) -> list[Row]:
    """A row a text with id and language; the speaker's own recording of it, if `given` names one, as `source`."""
    rows = []
    for number, row in enumerate(given, 1):
        try:
            text = check_text(_string(row, "text"))
            spoken_in = (_string(row, "language") or "auto") if language.lower() == "auto" else language
            # Another speaker's text may be said, too, but their recording of it is none of this voice.
            is_own = (_string(row, "speaker") or speaker).lower() == speaker
            recording = _string(row, "audio") if is_own else ""
        except ValueError as error:
            raise ValueError(f"{path}, text {number}: {error}") from error
        kept: Row = {"id": f"{number:04}", "text": text, "language": spoken_in.lower()}
        rows.append(kept | ({"source": recording} if recording else {}))
    return rows


def _string(row: Row, name: str) -> str:
    value = row.get(name)
    if not isinstance(value, str | None):
        raise ValueError(f"its {name} is {value!r}, and a string is expected")
    return value or ""
