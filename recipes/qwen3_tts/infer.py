"""Speaks held-out texts with the base model, cloning from a reference, and with the fine-tuned voice.

python infer.py --voice voice/voice-anna --ref-audio ref.wav --output-dir voice/evaluation --i-have-consent
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
from consent import CONSENT_FLAG, add_consent, require_consent
from evaluation_folder import SETTINGS, SPEECH, SYNTHETIC
from qwen import (
    BASE_MODELS,
    check_language,
    chosen_device,
    identity,
    load_voice_model,
    local_folder,
    require_base,
    trained_language,
    wants_whole_text,
)
from rows import Row, read_rows, write_rows
from texts import read_texts, strange_letters, texts_to_say
from voice_folder import HELD_OUT, held_out_texts, made_from, recorded_consent, speaker_of
from zero_shot_clone import load_reference, provenance_of

from keepstep.data.fetch import whole_file

if TYPE_CHECKING:
    from qwen_tts import Qwen3TTSModel

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
    consent: dict[str, Any]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--base-model", help="folder or hub id of the one that clones; without it what the voice was made from")
    add("--voice", type=Path, required=True, help="folder that export.py wrote")
    add("--speaker", help="which of the voice's speakers; needed if it has several")
    texts = "a text a line, or JSONL rows with text (and audio: the real one); without it those that training held out"
    add("--texts", type=Path, help=texts)
    add("--ref-audio", type=Path, required=True, help="recording of the speaker that the base model clones from")
    add("--ref-text", help="what it says: clones in context; without it by x-vector")
    add("--output-dir", type=Path, default=Path("voice/evaluation"), help="folder for recordings and their rows")
    languages = "auto: for the voice the one it was trained in, for the base model that of a row, or its own choice"
    add("--language", default="auto", help=f"of the texts, as English; {languages}")
    add("--seed", type=int, default=0, help="another one speaks the texts otherwise")
    add("--max-new-tokens", type=int, default=750, help="longest utterance, in tokens: 12.5 are a second")
    add("--batch-size", type=int, default=1, help="texts spoken at once; another one gives other samples")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="(default: %(default)s)")
    add_consent(parser)
    return parser.parse_args(argv)


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


def base_model_of(args: argparse.Namespace) -> str:
    """--base-model, or what the voice was made from; a word where that may not be what is meant."""
    origin = made_from(args.voice)
    if args.base_model is None:
        chosen = origin or BASE_MODELS[1]
        why = "the voice was made from it" if origin else "the voice does not say what it was made from"
        print(f"base model: {chosen} ({why}; --base-model names another)")
        return chosen
    if origin is not None and Path(args.base_model).resolve() != Path(origin).resolve():
        print(f"--base-model {args.base_model} is compared, and the voice was made from {origin}")
    return str(args.base_model)


def consents(args: argparse.Namespace, speaker: str) -> dict[str, dict[str, Any]]:
    """On what each system's speech rests: what the voice was trained with says nothing of who speaks in --ref-audio."""
    if not args.i_have_consent:
        raise ValueError(
            f"the base model clones whoever speaks in {args.ref_audio}, of whom the voice's own consent says nothing: "
            f"say {CONSENT_FLAG} if they agreed to it, or its licence allows it (--consent-note says which)"
        )
    return {
        "base": require_consent(args, []),
        "fine_tuned": recorded_consent(args.voice) or require_consent(args, [speaker]),
    }


def clone_mode(ref_text: str | None) -> str:
    return IN_CONTEXT if ref_text and ref_text.strip() else "x-vector"


def make_voices(
    args: argparse.Namespace, speaker: str, reference: Wav, device: str, consent: dict[str, dict[str, Any]]
) -> list[Voice]:
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
        trained = trained_language(model) if args.language.lower() == "auto" else None
        return model, lambda texts, languages, most: _wavs(
            model.generate_custom_voice(
                texts,
                speaker,
                [trained] * len(texts) if trained else languages,
                non_streaming_mode=wants_whole_text(model),
                max_new_tokens=most,
            )
        )

    shared = (args.seed, args.max_new_tokens, args.batch_size, device)
    heard = hashlib.sha256(reference.tobytes()).hexdigest()
    base_key = _key(*shared, _model_identity(args.base_model), heard, args.ref_text if in_context else None)
    tuned_key = _key(*shared, _model_identity(str(args.voice)), speaker, args.language.lower())
    cloned, tuned = f"zero-shot clone, {clone_mode(args.ref_text)}", f"fine-tuned voice {speaker}"
    return [
        Voice("base", speaker, args.base_model, cloned, load_base, base_key, consent["base"]),
        Voice("fine_tuned", speaker, str(args.voice), tuned, load_fine_tuned, tuned_key, consent["fine_tuned"]),
    ]


def _wavs(generated: tuple[list[Any], int]) -> list[Wav]:
    wavs, sample_rate_hz = generated
    return [soxr.resample(np.asarray(wav, np.float32), sample_rate_hz, SAMPLE_RATE_HZ) for wav in wavs]


def _model_identity(path_or_id: str) -> list[Any]:
    """Its settings and weights, the codec's too, wherever it lies and whenever it was written.

    All weights are read for it, gigabytes, once a run: as much as loading them reads.
    """
    folder = local_folder(path_or_id)
    settings = [folder / name for name in ("config.json", "generation_config.json")]
    weights = sorted({path.parent for path in folder.rglob("*.safetensors")})
    return [
        [path.read_text(encoding="utf-8") for path in settings if path.is_file()],
        [(path.relative_to(folder).as_posix(), identity(path)) for path in weights],
    ]


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


def speak(voice: Voice, batches: list[Batch], rows: list[Row], folder: Path, args: Any) -> None:
    """Rows are written after every batch, so a run that was stopped goes on from there."""
    model, say = voice.load()
    for row in rows:
        check_language(model, row["language"])
    note = str(voice.consent.get("note", ""))
    provenance = provenance_of(voice.model_path, voice.method, str(args.seed), note)
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
        write_rows(folder / SPEECH, rows)
        print(f"{voice.system}: said {', '.join(row['id'] for row in batch)} in {took_s:.1f} s", flush=True)


def _is_said(row: Row, system: str, key: str) -> bool:
    return row.get("keys", {}).get(system) == key and Path(row.get(system, "")).is_file()


def take_over(rows: list[Row], folder: Path) -> None:
    """Puts what an earlier run has said of the same texts into `rows`; keys decide later whether it still holds."""
    if not (folder / SPEECH).is_file():
        return
    earlier = {(row["id"], row["text"]): row for row in read_rows(folder / SPEECH, needed=("id", "text"))}
    for row in rows:
        before = earlier.get((row["id"], row["text"]), {})
        row |= {name: before[name] for name in (*SYNTHETIC, *OF_EACH_SYSTEM) if name in before}


def run(args: argparse.Namespace) -> None:
    for name, least in (("max_new_tokens", 3), ("batch_size", 1)):
        if getattr(args, name) < least:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(args, name)}: at least {least} is needed")
    speaker = speaker_of(args.voice, args.speaker)
    given = read_texts(args.texts) if args.texts else held_out_texts(args.voice, speaker)
    rows = texts_to_say(given, args.texts or args.voice / HELD_OUT, args.language, speaker)
    if warning := strange_letters(row["text"] for row in rows):
        print(warning)
    consent = consents(args, speaker)
    reference = load_reference(args.ref_audio)
    device = chosen_device(args.device)
    args.base_model = base_model_of(args)
    voices = make_voices(args, speaker, reference, device, consent)
    folder = args.output_dir.resolve()
    take_over(rows, folder)
    copy_real(rows, folder, speaker)
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    settings = {name: value for name, value in settings.items() if name not in NOT_SETTINGS} | {
        "texts": str(args.texts or args.voice / HELD_OUT),
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
            speak(voice, batches, rows, folder, args)
    write_rows(folder / SPEECH, rows)
    for voice in voices:
        print(summary(voice.system, rows))
    print(f"written: {args.output_dir / SPEECH}; python evaluate.py --evaluation-dir {args.output_dir} scores it")


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
