"""What is said: everyday sentences of WordNet, and simple ones of 67 words; no sentence is in two of the files.

python sentences.py --output texts      # train.txt, train_simple.txt, target.txt, held_out_everyday.txt, ..._simple.txt
"""

from __future__ import annotations

import argparse
import random
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

WORDS = {
    "verb": "bring take show give find hold keep move paint open watch clean sell carry draw",
    "adjective": "red blue green small large old new round dark light heavy broken wooden silver empty",
    "noun": "box table window garden river bottle letter flower hammer basket mirror pencil candle blanket ladder"
    " camera kitchen mountain island station",
    "place": "near behind under above inside beside from with",
    "time": "today tomorrow now again tonight later soon slowly",
}
SIMPLE = 6_500
HELD_OUT = 20
KNOWN = 3
"""A held-out everyday sentence has words that this many others have, at least: it asks for reading, not for names."""


def simple_sentence(drawn: random.Random) -> str:
    def one(kind: str) -> str:
        return drawn.choice(WORDS[kind].split())

    words = [one("verb").capitalize(), "the", one("adjective"), one("noun")]
    if drawn.random() < 0.7:
        words += [one("place"), "the"]
        words += [one("adjective")] if drawn.random() < 0.4 else []
        words += [one("noun")]
    if drawn.random() < 0.6:
        words.append(one("time"))
    return " ".join(words) + "."


def simple_sentences(count: int, seed: int = 0) -> list[str]:
    drawn = random.Random(seed)
    found: dict[str, None] = {}
    while len(found) < count:
        found.setdefault(simple_sentence(drawn))
    return list(found)


def everyday_sentences(folder: Path = Path("/usr/share/wordnet")) -> list[str]:
    """WordNet's examples of use, 4 to 14 words, free to use (Debian: wordnet-base)."""
    files = sorted(folder.glob("data.*"))
    if not files:
        raise ValueError(f"{folder} has no WordNet: apt-get install wordnet-base")
    found: dict[str, str] = {}
    for path in files:
        for gloss in re.findall(r"\| (.*)", path.read_text(encoding="latin-1")):
            for example in re.findall(r'"([^"]+)"', gloss):
                text = example.strip().rstrip(";,")
                if re.fullmatch(r"[A-Za-z',.?! -]+", text) and 4 <= len(text.split()) <= 14:
                    text = text[0].upper() + text[1:] + ("" if text[-1] in ".?!" else ".")
                    found.setdefault(text.lower(), text)
    return list(found.values())


def words_of(text: str) -> list[str]:
    return re.findall(r"[a-z']+", text.lower())


def known_words(texts: Sequence[str]) -> set[str]:
    """Those that more than KNOWN of the texts have: whichever of these is taken away, KNOWN are left."""
    counts = Counter(word for text in texts for word in set(words_of(text)))
    return {word for word, count in counts.items() if count > KNOWN}


def divided(
    everyday: Sequence[str], simple: Sequence[str], target_everyday: int, target_simple: int, seed: int = 0
) -> dict[str, list[str]]:
    """The sentences of each file; the target voice is trained on so many of each kind."""
    everyday = random.Random(seed).sample(list(everyday), len(everyday))
    known = known_words(everyday)
    held_out = [text for text in everyday if len(words_of(text)) <= 10 and known.issuperset(words_of(text))][:HELD_OUT]
    others = [text for text in everyday if text not in held_out]
    train_simple = simple[HELD_OUT + target_simple :]
    return {
        "train.txt": [*others[target_everyday:], *train_simple],
        "train_simple.txt": list(train_simple),
        "target.txt": [*others[:target_everyday], *simple[HELD_OUT : HELD_OUT + target_simple]],
        "held_out_everyday.txt": held_out,
        "held_out_simple.txt": list(simple[:HELD_OUT]),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--target-everyday", type=int, default=700, help="for the target voice (default: %(default)s)")
    parser.add_argument("--target-simple", type=int, default=240, help="for the target voice (default: %(default)s)")
    args = parser.parse_args(argv)
    try:
        everyday = everyday_sentences()
    except ValueError as error:
        sys.exit(f"sentences.py: {error}")
    args.output.mkdir(parents=True, exist_ok=True)
    simple = simple_sentences(SIMPLE + args.target_simple + HELD_OUT)
    files = divided(everyday, simple, args.target_everyday, args.target_simple)
    for name, texts in files.items():
        (args.output / name).write_text("\n".join(texts) + "\n")
    print(f"{', '.join(f'{len(texts):,} in {name}' for name, texts in files.items())} in {args.output}")


if __name__ == "__main__":
    main()
