"""Text as it is spoken, so that a transcript and a script that say the same are the same, and what differs if not."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass

_ONES = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
_TENS = ("zero", "ten", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_SCALES = ((1_000_000_000, "billion"), (1_000_000, "million"), (1_000, "thousand"), (100, "hundred"))
_LARGEST = 10**12
_ORDINALS = {
    "one": "first",
    "two": "second",
    "three": "third",
    "five": "fifth",
    "eight": "eighth",
    "nine": "ninth",
    "twelve": "twelfth",
}
_WRITTEN_SHORT = {"mr": "mister", "mrs": "missus", "dr": "doctor", "messrs": "messieurs", "vs": "versus"}
_SIGNS = {"&": " and ", "%": " percent ", "+": " plus ", "=": " equals ", "@": " at "}
_MONEY = {"$": "dollar", "£": "pound", "€": "euro"}
# Scripts written without spaces: every character counts as a word, so that a word error rate means something.
_WITHOUT_SPACES = re.compile(r"([\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff])")
_NUMBER = r"\d{1,3}(?:,\d{3})+|\d+"


@dataclass(frozen=True)
class Errors:
    """A transcript against what was to be said."""

    num_words: int
    num_word_errors: int
    num_characters: int
    """Without spaces: "block books" for "blockbooks" is an error of words, not of characters."""
    num_character_errors: int
    marks: tuple[tuple[str, str, str], ...]
    """(equal, substitute, delete or insert; words to be said; words heard), in order."""

    @property
    def wer(self) -> float:
        return self.num_word_errors / self.num_words

    @property
    def cer(self) -> float:
        return self.num_character_errors / self.num_characters


def compare(text: str, transcript: str) -> Errors:
    """Aligns both in their spoken form; rates above 1 are possible, where more was heard than was to be said."""
    import jiwer

    said, heard = spoken_form(text), spoken_form(transcript)
    if not said:
        raise ValueError(f"the text {text!r} has no words to compare with")
    words = jiwer.process_words(said, heard)
    characters = jiwer.process_characters(said.replace(" ", ""), heard.replace(" ", ""))
    reference, hypothesis = words.references[0], words.hypotheses[0]
    marks = tuple(
        (
            piece.type,
            " ".join(reference[piece.ref_start_idx : piece.ref_end_idx]),
            " ".join(hypothesis[piece.hyp_start_idx : piece.hyp_end_idx]),
        )
        for piece in words.alignments[0]
    )
    return Errors(len(reference), _count(words), len(said.replace(" ", "")), _count(characters), marks)


def _count(output: object) -> int:
    return sum(getattr(output, kind) for kind in ("substitutions", "deletions", "insertions"))


def spoken_form(text: str) -> str:
    """Lower case, no punctuation, simple English numbers in words: "May 3rd, 1850" is "may third eighteen fifty"."""
    text = unicodedata.normalize("NFKC", text).lower()
    text = re.sub("[\u2018\u2019\u02bc\u00b4`]", "'", text)
    for sign, unit in _MONEY.items():
        text = re.sub(rf"{re.escape(sign)}\s?({_NUMBER})", rf"\1 {unit}s", text)
    for sign, word in _SIGNS.items():
        text = text.replace(sign, word)
    text = re.sub(rf"\b({_NUMBER})(st|nd|rd|th)\b", lambda found: _ordinal(_integer(found[1])), text)
    text = re.sub(r"\b(1[1-9]\d\d|20[1-9]\d)\b(?![,.]\d)", lambda found: _year(int(found[1])), text)
    text = re.sub(rf"\b({_NUMBER})\.(\d+)\b", lambda found: _decimal(found[1], found[2]), text)
    text = re.sub(rf"\b({_NUMBER})\b", lambda found: _cardinal_or_digits(found[1]), text)
    text = _WITHOUT_SPACES.sub(r" \1 ", text.replace("'", ""))
    # Marks (category M) belong to the letter before them: without them Hindi or Thai would fall into pieces.
    kept = (char if char.isalnum() or unicodedata.category(char)[0] == "M" else " " for char in text)
    return " ".join(_WRITTEN_SHORT.get(word, word) for word in "".join(kept).split())


def _integer(digits: str) -> int:
    return int(digits.replace(",", ""))


def _cardinal_or_digits(digits: str) -> str:
    """01524 and numbers as long as a telephone's are read digit by digit."""
    if (len(digits) > 1 and digits[0] == "0") or _integer(digits) >= _LARGEST:
        return " ".join(_ONES[int(digit)] for digit in digits.replace(",", ""))
    return _cardinal(_integer(digits))


def _cardinal(number: int) -> str:
    if number < 20:
        return _ONES[number]
    if number < 100:
        return " ".join([_TENS[number // 10], *([_ONES[number % 10]] if number % 10 else [])])
    size, name = next((size, name) for size, name in _SCALES if number >= size)
    return " ".join([_cardinal(number // size), name, *([_cardinal(number % size)] if number % size else [])])


def _ordinal(number: int) -> str:
    *before, last = (_cardinal(number) if number < _LARGEST else str(number)).split()
    regular = f"{last[:-1]}ieth" if last.endswith("y") else f"{last}th"
    return " ".join([*before, _ORDINALS.get(last, regular)])


def _year(number: int) -> str:
    """1850 is eighteen fifty, 1906 nineteen oh six, 1900 nineteen hundred."""
    century, rest = divmod(number, 100)
    tail = "hundred" if rest == 0 else _cardinal(rest) if rest >= 10 else f"oh {_ONES[rest]}"
    return f"{_cardinal(century)} {tail}"


def _decimal(whole: str, fraction: str) -> str:
    return f"{_cardinal_or_digits(whole)} point {' '.join(_ONES[int(digit)] for digit in fraction)}"
