"""Speaks held-out texts with the base model, cloning from a reference, and with the fine-tuned voice.

python infer.py --base-model Qwen/Qwen3-TTS-12Hz-0.6B-Base --voice voice/voice-anna --texts held_out.jsonl \\
    --ref-audio ref.wav --output-dir voice/evaluation
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import soxr
import torch
from audio import SAMPLE_RATE_HZ, AudioError, Wav, load_audio, write_wav
from consent import add_consent, require_consent
from qwen import (
    BASE_MODELS,
    check_language,
    chosen_device,
    load_voice_model,
    local_folder,
    require_base,
    wants_whole_text,
)
from rows import Row, read_rows, write_rows
from zero_shot_clone import load_reference, provenance_of

from keepstep.data.fetch import whole_file

if TYPE_CHECKING:
    from qwen_tts import Qwen3TTSModel

GENERATED = "generated.jsonl"
"""A row a text: {id, text, language, base, fine_tuned, real, source, seconds, frames, cut, keys}."""
SETTINGS = "infer.json"
OF_EACH_SYSTEM = ("seconds", "frames", "cut", "keys")
"""Fields of a row that hold a value for each system."""
NOT_SETTINGS = ("i_have_consent", "consent_note", "output_dir")

FRAMES_PER_SECOND = 12.5
IN_CONTEXT = "in context"
"""The base model goes on from the reference's sound and text; by x-vector it knows the voice alone."""

Say = Callable[[list[str], list[str], int], list[Wav]]
"""Texts, their languages and the most tokens of each to speech at SAMPLE_RATE_HZ."""
Batch = tuple[list[Row], str]
"""Rows said at once, and their key."""


@dataclass(frozen=True)
class Voice:
    """One of the two that are compared; its model is loaded only if there is something left to say."""

    system: str
    speaker: str
    model_path: str
    method: str
    load: Callable[[], tuple[Qwen3TTSModel, Say]]
    key: str
    """Changes with everything that changes what it says."""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--base-model", default=BASE_MODELS[0], help="folder or hub id of the base model, which clones")
    add("--voice", type=Path, required=True, help="folder that export.py wrote")
    add("--speaker", help="which of the voice's speakers; needed if it has several")
    add("--texts", type=Path, required=True, help="a text a line, or JSONL rows with text (and audio: the real one)")
    add("--ref-audio", type=Path, required=True, help="recording of the speaker that the base model clones from")
    add("--ref-text", help="what it says: clones in context; without it by x-vector")
    add("--output-dir", type=Path, default=Path("voice/evaluation"), help="folder for recordings and their rows")
    add("--language", default="auto", help="of the texts, as English; auto: that of a row, or the model's choice")
    add("--seed", type=int, default=0, help="another one speaks the texts otherwise")
    add("--max-new-tokens", type=int, default=750, help="longest utterance, in tokens: 12.5 are a second")
    add("--batch-size", type=int, default=1, help="texts spoken at once; another one gives other samples")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="(default: %(default)s)")
    add_consent(parser)
    return parser.parse_args(argv)


# ---- what is to be said


def read_texts(path: Path, language: str) -> list[Row]:
    """A row a text with id and language; the real recording, if a row has one, as `source`."""
    if path.suffix.lower() in (".jsonl", ".json"):
        given = read_rows(path, needed=("text",))
    elif path.is_file():
        given = [{"text": line.strip()} for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    else:
        raise ValueError(f"{path} is not there: give a text a line, or JSONL rows with text")
    if not given:
        raise ValueError(f"{path} has no texts")
    rows = []
    for number, row in enumerate(given, 1):
        if not any(character.isalnum() for character in row["text"]):
            raise ValueError(f"{path}, text {number}: {row['text']!r} has no words to say")
        spoken_in = row.get("language") or "auto" if language.lower() == "auto" else language
        kept: Row = {"id": f"{number:04}", "text": row["text"].strip(), "language": spoken_in.lower()}
        rows.append(kept | ({"source": row["audio"]} if row.get("audio") else {}))
    return rows


def copy_real(rows: list[Row], folder: Path, speaker: str) -> None:
    """The real recordings beside the generated ones: the folder can be sent whole. One that can't be read is named."""
    for row in rows:
        if "source" in row:
            path = folder / "real" / f"{row['id']}.wav"
            provenance = {"synthetic": "no", "speaker": speaker, "source": Path(row["source"]).name}
            try:
                write_wav(path, load_audio(row["source"]), provenance=provenance)
                row["real"] = str(path)
            except AudioError as error:
                row["real_missing"] = str(error)
                print(f"text {row['id']} goes without its real recording: {error}")


# ---- who says it


def speaker_of(voice: Path, asked: str | None) -> str:
    """The speaker of a custom-voice folder, by its configuration: nothing is loaded for a wrong name."""
    if not (voice / "config.json").is_file():
        raise ValueError(f"{voice} has no config.json: name the folder that export.py wrote")
    config = json.loads((voice / "config.json").read_text(encoding="utf-8"))
    kind = config.get("tts_model_type")
    if kind != "custom_voice":
        raise ValueError(f"{voice} is a {kind} model; a fine-tuned voice is expected, as export.py writes it")
    speakers = sorted(config["talker_config"]["spk_id"])
    if asked is None and len(speakers) != 1:
        raise ValueError(f"{voice} has several speakers ({', '.join(speakers)}): choose one with --speaker")
    speaker = (asked or speakers[0]).lower()
    if speaker not in speakers:
        raise ValueError(f"{voice} has no speaker {speaker}; it has {', '.join(speakers)}")
    return speaker


def consent_of(args: argparse.Namespace, speaker: str) -> dict[str, Any]:
    """As it was stated when the voice was trained; a voice from elsewhere needs the flag here."""
    recorded = args.voice / "consent.json"
    if recorded.is_file():
        return dict(json.loads(recorded.read_text(encoding="utf-8")))
    return require_consent(args, [speaker])


def clone_mode(ref_text: str | None) -> str:
    return IN_CONTEXT if ref_text and ref_text.strip() else "x-vector"


def make_voices(args: argparse.Namespace, speaker: str, reference: Wav, device: str) -> list[Voice]:
    in_context = clone_mode(args.ref_text) == IN_CONTEXT

    def load_base() -> tuple[Qwen3TTSModel, Say]:
        model = load_voice_model(args.base_model, device)
        require_base(model, args.base_model)
        prompt = model.create_voice_clone_prompt(
            (reference, SAMPLE_RATE_HZ), args.ref_text if in_context else None, x_vector_only_mode=not in_context
        )
        return model, lambda texts, languages, most: _wavs(
            model.generate_voice_clone(texts, languages, voice_clone_prompt=prompt, max_new_tokens=most)
        )

    def load_fine_tuned() -> tuple[Qwen3TTSModel, Say]:
        model = load_voice_model(str(args.voice), device)
        return model, lambda texts, languages, most: _wavs(
            model.generate_custom_voice(
                texts, speaker, languages, non_streaming_mode=wants_whole_text(model), max_new_tokens=most
            )
        )

    shared = (args.seed, args.max_new_tokens, args.batch_size, device)
    heard = hashlib.sha256(reference.tobytes()).hexdigest()
    base_key = _key(*shared, _model_identity(args.base_model), heard, args.ref_text if in_context else None)
    tuned_key = _key(*shared, _model_identity(str(args.voice)), speaker)
    return [
        Voice("base", speaker, args.base_model, f"zero-shot clone, {clone_mode(args.ref_text)}", load_base, base_key),
        Voice("fine_tuned", speaker, str(args.voice), f"fine-tuned voice {speaker}", load_fine_tuned, tuned_key),
    ]


def _wavs(generated: tuple[list[Any], int]) -> list[Wav]:
    wavs, sample_rate_hz = generated
    return [soxr.resample(np.asarray(wav, np.float32), sample_rate_hz, SAMPLE_RATE_HZ) for wav in wavs]


def _model_identity(path_or_id: str) -> list[Any]:
    """Tells one export from the next at the same place, without reading gigabytes."""
    folder = local_folder(path_or_id)
    files = folder.rglob("*.safetensors")  # the codec's, too
    stats = [(str(path.relative_to(folder)), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return [str(folder.resolve()), (folder / "config.json").read_text(encoding="utf-8"), sorted(stats)]


def _key(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


# ---- saying it


def open_batches(voice: Voice, rows: list[Row], batch_size: int) -> list[Batch]:
    """What is still to be said, and the key of each batch; what was said otherwise is dropped from its rows."""
    found = []
    for start in range(0, len(rows), batch_size):
        batch = rows[start : start + batch_size]
        key = _key(voice.key, [(row["id"], row["text"], row["language"]) for row in batch])
        # A batch shares one stream of random numbers: it is kept whole, or said again whole and alike.
        if not all(_is_said(row, voice.system, key) for row in batch):
            found.append((batch, key))
            for row in batch:
                row.pop(voice.system, None)
                for name in OF_EACH_SYSTEM:
                    row.get(name, {}).pop(voice.system, None)
    return found


def speak(voice: Voice, batches: list[Batch], rows: list[Row], folder: Path, args: Any, consent_note: str) -> None:
    """Rows are written after every batch, so a run that was stopped goes on from there."""
    model, say = voice.load()
    for row in rows:
        check_language(model, row["language"])
    provenance = provenance_of(voice.model_path, voice.method, str(args.seed), consent_note)
    provenance["speaker"] = voice.speaker
    codec = model.model.speech_tokenizer
    samples_per_frame = codec.get_decode_upsample_rate() * SAMPLE_RATE_HZ / codec.get_output_sample_rate()
    first = batches[0][0][0]
    say([first["text"]], [first["language"]], 4)  # else what is made ready at first use would count as its time
    for batch, key in batches:
        torch.manual_seed(int(_key(args.seed, batch[0]["id"]), 16) >> 1)
        began = time.perf_counter()
        wavs = say([row["text"] for row in batch], [row["language"] for row in batch], args.max_new_tokens)
        took_s = time.perf_counter() - began
        total = sum(len(wav) for wav in wavs)
        for row, wav in zip(batch, wavs, strict=True):
            path = folder / voice.system / f"{row['id']}.wav"
            write_wav(path, wav, provenance=provenance)
            num_frames = round(len(wav) / samples_per_frame)
            row[voice.system] = str(path)
            of_this = {
                "seconds": round(took_s * len(wav) / total, 3),  # a batch's time, shared by how much each had to say
                "frames": num_frames,
                "cut": num_frames >= args.max_new_tokens - 1,  # the last token is the end, or is not spoken
                "keys": key,
            }
            for name, value in of_this.items():
                row.setdefault(name, {})[voice.system] = value
        write_rows(folder / GENERATED, rows)
        print(f"{voice.system}: said {', '.join(row['id'] for row in batch)} in {took_s:.1f} s", flush=True)


def _is_said(row: Row, system: str, key: str) -> bool:
    return row.get("keys", {}).get(system) == key and Path(row.get(system, "")).is_file()


def take_over(rows: list[Row], folder: Path) -> None:
    """Puts what an earlier run has said of the same texts into `rows`; keys decide later whether it still holds."""
    if not (folder / GENERATED).is_file():
        return
    earlier = {(row["id"], row["text"]): row for row in read_rows(folder / GENERATED, needed=("id", "text"))}
    for row in rows:
        before = earlier.get((row["id"], row["text"]), {})
        row |= {name: before[name] for name in ("base", "fine_tuned", *OF_EACH_SYSTEM) if name in before}


def run(args: argparse.Namespace) -> None:
    for name, least in (("max_new_tokens", 3), ("batch_size", 1)):
        if getattr(args, name) < least:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(args, name)}: at least {least} is needed")
    rows = read_texts(args.texts, args.language)
    speaker = speaker_of(args.voice, args.speaker)
    consent = consent_of(args, speaker)
    reference = load_reference(args.ref_audio)
    device = chosen_device(args.device)
    voices = make_voices(args, speaker, reference, device)
    folder = args.output_dir.resolve()
    take_over(rows, folder)
    copy_real(rows, folder, speaker)
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    settings = {name: value for name, value in settings.items() if name not in NOT_SETTINGS} | {
        "speaker": speaker,
        "ref_audio": str(args.ref_audio.resolve()),
        "clone_mode": clone_mode(args.ref_text),
        "device": device,
        "consent": consent,
    }
    folder.mkdir(parents=True, exist_ok=True)
    with whole_file(folder / SETTINGS) as file:
        file.write((json.dumps(settings, indent=1, ensure_ascii=False) + "\n").encode())
    to_say = [open_batches(voice, rows, args.batch_size) for voice in voices]
    for voice, batches in zip(voices, to_say, strict=True):
        num_open = sum(len(batch) for batch, _ in batches)
        print(f"{voice.system}: {num_open} of {len(rows)} still to say")
        if batches:
            speak(voice, batches, rows, folder, args, str(consent.get("note", "")))
    write_rows(folder / GENERATED, rows)
    for voice in voices:
        print(summary(voice.system, rows))
    print(f"written: {args.output_dir / GENERATED}; python evaluate.py --evaluation-dir {args.output_dir} scores it")


def summary(system: str, rows: list[Row]) -> str:
    spoken_s = sum(row["frames"][system] for row in rows) / FRAMES_PER_SECOND
    took_s = sum(row["seconds"][system] for row in rows)
    num_cut = sum(row["cut"][system] for row in rows)
    cut = f"; {num_cut} of {len(rows)} did not end by themselves, cut at --max-new-tokens" if num_cut else ""
    return f"{system}: {spoken_s:.1f} s of speech, real-time factor {took_s / spoken_s:.2f}{cut}"


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    try:
        run(args)
    except ValueError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
