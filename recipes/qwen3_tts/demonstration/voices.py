"""Makes speech of many voices with what installs offline: flite and espeak-ng (Debian), hibari (PyPI).

python voices.py --texts texts/train.txt --output corpus --utterances 30000
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import soxr

SAMPLE_RATE_HZ = 22_050
TICK_S = 0.1
"""How often a corpus says how far its speakers are in their texts."""
PAUSE_S = 0.25
"""Between two sentences."""
QUIET = 0.02
"""A moment with less of the loudest moment's level is a pause."""
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
    natural = [Voice("hibari", "heart", share=12), *(Voice("flite", name, share=4) for name in ("slt", "rms", "awb"))]
    shifted = [
        Voice(voice.synthesiser, voice.name, shift, share=2 if voice.name == "heart" else 0.5)
        for voice in natural
        for shift in SHIFTS
    ]
    robots = [Voice("flite", "kal16", share=0.5), *(Voice("espeak", name, share=0.15) for name in ESPEAK)]
    return [*natural, *shifted, *robots]


def chosen_voices(names: Sequence[str]) -> list[Voice]:
    """Those that are named, with a share as large as the others'; all, if none is."""
    known = {voice.speaker: voice for voice in all_voices()}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"there is no voice {', '.join(unknown)}; there are {', '.join(known)}")
    return [replace(known[name], share=1.0) for name in names] or list(known.values())


def plan(
    texts: Sequence[str],
    num_utterances: int,
    seed: int = 0,
    voices: Sequence[Voice] = (),
    most_sentences: int = 3,
    shuffled: float = 0.0,
) -> Iterator[tuple[Voice, list[str]]]:
    """Who says what: half of the utterances are two or three sentences, so that long ones are known too.

    The share `shuffled` of them has its words in any order: what comes next is then known from the text alone.
    """
    drawn = random.Random(seed)
    voices = voices or all_voices()
    total = sum(voice.share for voice in voices)
    for voice in voices:
        for _ in range(round(num_utterances * voice.share / total)):
            count = min(most_sentences, drawn.choices((1, 2, 3), (50, 32, 18))[0])
            sentences = drawn.sample(texts, count)
            yield voice, [_shuffled(one, drawn) for one in sentences] if drawn.random() < shuffled else sentences


def _shuffled(sentence: str, drawn: random.Random) -> str:
    words = re.findall(r"[\w'-]+", sentence.lower())
    return " ".join(drawn.sample(words, len(words))).capitalize() + "."


def synthesise(voice: Voice, sentences: Sequence[str]) -> tuple[np.ndarray, int, list[int]]:
    """(float32 samples, rate, characters said by each tick) of some sentences one after the other."""
    make = {"flite": _flite, "espeak": _espeak, "hibari": _hibari}[voice.synthesiser]
    wavs: list[np.ndarray] = []
    said: list[np.ndarray] = []
    num_said = 0
    for sentence in sentences:
        wav, made_at = make(voice.name, sentence)
        wav, rate = _trimmed(wav, made_at), round(made_at * voice.shift)
        if wavs:
            pause = np.zeros(int(PAUSE_S * rate), np.float32)
            wavs.append(pause)
            said.append(np.full(len(pause), num_said))
        wavs.append(wav)
        said.append(num_said + characters_said(wav, len(sentence) + 1))
        num_said += len(sentence) + 1
    ticks = np.arange(0, sum(map(len, wavs)), TICK_S * rate).astype(int)
    return np.concatenate(wavs), rate, np.concatenate(said)[ticks].astype(int).tolist()


def characters_said(wav: np.ndarray, num_characters: int) -> np.ndarray:
    """How many characters have been said by each sample: letters take the same time each, pauses take none."""
    window = max(1, len(wav) // 200)
    level = np.convolve(np.abs(wav), np.ones(window) / window, "same")
    spoken = np.cumsum(level > QUIET * level.max())
    return num_characters * spoken / max(1, spoken[-1])


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


def _make_chunk(place: tuple[int, list[tuple[Voice, list[str]]], str]) -> tuple[int, float]:
    """One file of CHUNK utterances: 16-bit samples end to end, with their lengths and texts beside."""
    number, chunk, folder = place
    rows, wavs = [], []
    for voice, sentences in chunk:
        made, rate, said = synthesise(voice, sentences)
        wav = soxr.resample(made, rate, SAMPLE_RATE_HZ)
        wavs.append(np.clip(wav * 0.7 / max(1e-3, np.abs(wav).max()) * 32767, -32768, 32767).astype(np.int16))
        rows.append({"speaker": voice.speaker, "text": " ".join(sentences), "samples": len(wav), "said": said})
    np.save(Path(folder) / f"{number:05d}.npy", np.concatenate(wavs))
    with gzip.open(Path(folder) / f"{number:05d}.json.gz", "wt") as file:
        json.dump(rows, file)
    return len(rows), sum(row["samples"] for row in rows) / SAMPLE_RATE_HZ


def make_corpus(output: Path, said: list[tuple[Voice, list[str]]], seed: int = 0) -> None:
    output.mkdir(parents=True, exist_ok=True)
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
    parser.add_argument("--texts", type=Path, required=True, help="a sentence a line: train.txt of sentences.py")
    parser.add_argument("--voices", nargs="+", default=[], help="as heart slt rms heart-0.88 (default: all)")
    parser.add_argument("--most-sentences", type=int, default=3, help="in an utterance (default: %(default)s)")
    parser.add_argument("--shuffled", type=float, default=0.25, help="of the utterances (default: %(default)s)")
    args = parser.parse_args(argv)
    try:
        voices = chosen_voices(args.voices)
        texts = args.texts.read_text().splitlines()
    except FileNotFoundError:
        sys.exit(f"voices.py: {args.texts} is not there; sentences.py writes a train.txt")
    except ValueError as error:
        sys.exit(f"voices.py: {error}")
    if len(texts) < args.most_sentences or args.most_sentences < 1:
        sys.exit(f"voices.py: {args.texts} has {len(texts)} sentences, and an utterance --most-sentences of them")
    said = list(plan(texts, args.utterances, args.seed, voices, args.most_sentences, args.shuffled))
    make_corpus(args.output, said, args.seed)


if __name__ == "__main__":
    main()
