"""Makes speech of many voices with what installs offline: flite and espeak-ng (Debian), hibari (PyPI).

python voices.py --output corpus --utterances 30000
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import soxr

SAMPLE_RATE_HZ = 22_050
SHIFTS = (0.82, 0.88, 0.94, 1.07, 1.15, 1.24)
"""A voice played faster or slower has another pitch and another mouth: to the model, another speaker."""
ESPEAK = tuple(f"en-us+{variant}" for variant in ("m1", "m2", "m3", "m4", "m7", "f1", "f2", "f3", "f4", "f5"))
CHUNK = 50


@dataclass(frozen=True)
class Voice:
    """A synthesiser's voice, played at `shift` times its speed; `share` of the corpus is its own."""

    synthesiser: str
    name: str
    shift: float = 1.0
    share: float = 1.0

    @property
    def speaker(self) -> str:
        return f"{self.name}-{self.shift:g}" if self.shift != 1 else self.name


def all_voices() -> list[Voice]:
    natural = [Voice("hibari", "heart", share=9), *(Voice("flite", name, share=4) for name in ("slt", "rms", "awb"))]
    shifted = [
        Voice(voice.synthesiser, voice.name, shift, share=2 if voice.name == "heart" else 1)
        for voice in natural
        for shift in SHIFTS
    ]
    robots = [Voice("flite", "kal16", share=1), *(Voice("espeak", name, share=0.4) for name in ESPEAK)]
    return [*natural, *shifted, *robots]


def wordnet_sentences(folder: Path = Path("/usr/share/wordnet")) -> list[str]:
    """WordNet's examples of use, 4 to 14 words: everyday English, free to use (Debian: wordnet-base)."""
    files = sorted(folder.glob("data.*"))
    if not files:
        raise ValueError(f"{folder} has no WordNet: apt-get install wordnet-base, or give --texts FILE")
    found: dict[str, str] = {}
    for path in files:
        for gloss in re.findall(r"\| (.*)", path.read_text(encoding="latin-1")):
            for example in re.findall(r'"([^"]+)"', gloss):
                text = example.strip().rstrip(";,")
                if re.fullmatch(r"[A-Za-z',.?! -]+", text) and 4 <= len(text.split()) <= 14:
                    text = text[0].upper() + text[1:] + ("" if text[-1] in ".?!" else ".")
                    found.setdefault(text.lower(), text)
    return list(found.values())


def plan(texts: Sequence[str], num_utterances: int, seed: int = 0) -> Iterator[tuple[Voice, str]]:
    """Who says what: a quarter of the utterances are two or three sentences, so that long ones are known too."""
    drawn = random.Random(seed)
    voices = all_voices()
    total = sum(voice.share for voice in voices)
    for voice in voices:
        for _ in range(round(num_utterances * voice.share / total)):
            count = drawn.choices((1, 2, 3), (75, 18, 7))[0]
            yield voice, " ".join(drawn.sample(texts, count))


def synthesise(voice: Voice, text: str) -> tuple[np.ndarray, int]:
    """(float32 samples, rate) of a text, its pauses at both ends cut to a tenth of a second."""
    make = {"flite": _flite, "espeak": _espeak, "hibari": _hibari}[voice.synthesiser]
    wav, rate = make(voice.name, text)
    return _trimmed(wav, rate), round(rate * voice.shift)


def _flite(name: str, text: str) -> tuple[np.ndarray, int]:
    return _by_command(lambda path: ["flite", "-voice", name, "-t", text, "-o", path])


def _espeak(name: str, text: str) -> tuple[np.ndarray, int]:
    return _by_command(lambda path: ["espeak-ng", "-v", name, "-s", "150", "-w", path, text])


def _by_command(command: Any) -> tuple[np.ndarray, int]:
    import wave

    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "said.wav")
        subprocess.run(command(path), check=True, capture_output=True)
        with wave.open(path) as file:
            wav = np.frombuffer(file.readframes(file.getnframes()), dtype=np.int16)
            return wav.astype(np.float32) / 32768, file.getframerate()


@cache
def _hibari_model() -> Any:
    from hibari import Hibari

    return Hibari(voice="heart", threads=1)


def _hibari(_name: str, text: str) -> tuple[np.ndarray, int]:
    from hibari import SAMPLE_RATE

    return np.asarray(_hibari_model()(text), dtype=np.float32), SAMPLE_RATE


def _trimmed(wav: np.ndarray, rate: int) -> np.ndarray:
    loud = np.flatnonzero(np.abs(wav) > 0.01 * np.abs(wav).max(initial=1e-9))
    margin = rate // 10
    return wav[max(0, loud[0] - margin) : loud[-1] + margin] if len(loud) else wav


def _make_chunk(place: tuple[int, list[tuple[Voice, str]], str]) -> tuple[int, float]:
    """One file of CHUNK utterances: 16-bit samples end to end, with their lengths and texts beside."""
    number, chunk, folder = place
    rows, wavs = [], []
    for voice, text in chunk:
        wav = soxr.resample(*synthesise(voice, text), SAMPLE_RATE_HZ)
        wavs.append(np.clip(wav * 0.7 / max(1e-3, np.abs(wav).max()) * 32767, -32768, 32767).astype(np.int16))
        rows.append({"speaker": voice.speaker, "text": text, "samples": len(wav)})
    np.save(Path(folder) / f"{number:05d}.npy", np.concatenate(wavs))
    with gzip.open(Path(folder) / f"{number:05d}.json.gz", "wt") as file:
        json.dump(rows, file)
    return len(rows), sum(row["samples"] for row in rows) / SAMPLE_RATE_HZ


def make_corpus(output: Path, texts: Sequence[str], num_utterances: int, seed: int = 0) -> None:
    output.mkdir(parents=True, exist_ok=True)
    said = list(plan(texts, num_utterances, seed))
    random.Random(seed).shuffle(said)
    chunks = [(n, said[i : i + CHUNK], str(output)) for n, i in enumerate(range(0, len(said), CHUNK))]
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        made = list(pool.map(_make_chunk, chunks))
    print(f"{sum(n for n, _ in made):,} utterances, {sum(s for _, s in made) / 3600:.1f} hours in {output}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--utterances", type=int, default=30_000)
    parser.add_argument("--seed", type=int, default=0, help="another one says other texts")
    parser.add_argument("--texts", type=Path, help="a sentence a line (default: WordNet's examples)")
    args = parser.parse_args(argv)
    texts = args.texts.read_text().splitlines() if args.texts else wordnet_sentences()
    make_corpus(args.output, texts, args.utterances, args.seed)


if __name__ == "__main__":
    main()
