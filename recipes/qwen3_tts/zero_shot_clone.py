"""Says a text in the voice of a recording of a few seconds, without training.

python zero_shot_clone.py --ref-audio voice.wav --text "Good morning." --output out.wav --i-have-consent
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from audio import SAMPLE_RATE_HZ, Wav, audio_info, load_audio, write_wav
from consent import add_consent, require_consent
from qwen import BASE_MODELS, check_language, chosen_device, load_voice_model, require_base
from texts import check_text, strange_letters

if TYPE_CHECKING:
    from qwen_tts import Qwen3TTSModel

SHORTEST_S, LONGEST_S = 1.0, 30.0
"""Of a reference: of less the voice is not known, and more is slower and no better."""
SILENT_DB = -50.0
"""Speech, however quiet, is louder than this in the loudest tenth of its time."""
TELEPHONE_HZ = 16_000
"""A recording of a lower rate lacks what makes a voice clear, and so will the clone."""
MAX_NEW_TOKENS = 2048
"""Where neither the user nor the model's generation_config.json says it."""


@dataclass(frozen=True)
class Cloned:
    wav: Wav
    sample_rate_hz: int
    took_s: float
    method: str
    cut_short: bool
    """The model had not come to the end of the text when --max-new-tokens stopped it."""

    @property
    def duration_s(self) -> float:
        return len(self.wav) / self.sample_rate_hz

    @property
    def real_time_factor(self) -> float:
        """Seconds of work for a second of speech: below 1 is faster than it is spoken."""
        return self.took_s / self.duration_s

    def summary(self) -> str:
        took = f"in {self.took_s:.1f} s, real-time factor {self.real_time_factor:.2f}"
        return f"{self.method}: {self.duration_s:.1f} s of speech {took}"


def load_reference(path: str | Path, trim: bool = False, how_to_trim: str = "--trim-reference takes the first") -> Wav:
    """A recording to clone from, at 24 kHz; ValueError says what is wrong with it and what to do."""
    wav = load_audio(path)
    duration_s = len(wav) / SAMPLE_RATE_HZ
    if duration_s < SHORTEST_S:
        raise ValueError(
            f"the reference {path} has {duration_s:.2f} s: give one of 3 to 15 s, at least {SHORTEST_S:g} s"
        )
    if duration_s > LONGEST_S:
        if not trim:
            raise ValueError(
                f"the reference {path} has {duration_s:.1f} s: cut out the best 3 to 15 s of one voice "
                f"({how_to_trim} {LONGEST_S:g} s)"
            )
        wav = wav[: int(LONGEST_S * SAMPLE_RATE_HZ)]
    if loudness_db(wav) < SILENT_DB:
        raise ValueError(
            f"the reference {path} is silent ({loudness_db(wav):.0f} dB): check the microphone or the file"
        )
    return wav


def loudness_db(wav: Wav) -> float:
    """Of the loudest tenth of a recording, by tenths of a second, against full scale."""
    size = SAMPLE_RATE_HZ // 10
    whole = wav[: len(wav) // size * size].reshape(-1, size) if len(wav) >= size else wav[None]
    powers = np.sort((whole.astype(np.float64) ** 2).mean(1))
    return float(10 * np.log10(powers[-max(1, len(powers) // 10) :].mean() + 1e-20))


def load_base(path_or_id: str, device: str) -> Qwen3TTSModel:
    model = load_voice_model(path_or_id, device)
    require_base(model, path_or_id)
    return model


def clone(
    model: Qwen3TTSModel,
    text: str,
    reference: Wav,
    ref_text: str | None = None,
    language: str = "auto",
    seed: int | None = 0,
    max_new_tokens: int | None = None,
) -> Cloned:
    """With `ref_text`, what the reference says, in context: the model goes on from its sound; else by its x-vector."""
    text, language = check_text(text), check_language(model, language)
    in_context = bool(ref_text and ref_text.strip())
    if seed is not None:
        torch.manual_seed(seed)
    most = max_new_tokens or most_tokens(model)
    began = time.perf_counter()
    wavs, sample_rate_hz = model.generate_voice_clone(
        text=text,
        language=language,
        ref_audio=(reference, SAMPLE_RATE_HZ),
        ref_text=ref_text.strip() if ref_text and in_context else None,
        x_vector_only_mode=not in_context,
        max_new_tokens=most,
    )
    took_s = time.perf_counter() - began
    return Cloned(
        np.asarray(wavs[0], np.float32),
        sample_rate_hz,
        took_s,
        "in context, reference and its text" if in_context else "x-vector, reference without text",
        was_cut_short(model, wavs[0], most),
    )


def most_tokens(model: Qwen3TTSModel) -> int:
    """As its generation_config.json has it."""
    return int((model.generate_defaults or {}).get("max_new_tokens") or MAX_NEW_TOKENS)


def was_cut_short(model: Qwen3TTSModel, wav: Wav, max_new_tokens: int) -> bool:
    num_frames = len(wav) // int(model.model.speech_tokenizer.get_decode_upsample_rate())
    return num_frames >= max_new_tokens - 1  # the last token is the end, or is not spoken


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--ref-audio", required=True, help="recording of the voice, 3 to 15 s of one speaker, any format")
    add("--text", required=True, help="what to say")
    add("--output", type=Path, required=True, help="WAV file to write")
    add("--ref-text", help="what the reference says, word for word: clones in context, more like it")
    add("--x-vector-only", action="store_true", help="by the voice's x-vector alone; as without --ref-text")
    add("--trim-reference", action="store_true", help=f"of a longer one use the first {LONGEST_S:g} s")
    add("--language", default="auto", help="of the text, as English (default: %(default)s)")
    add("--model", default=BASE_MODELS[0], help="folder or hub id of a base model (default: %(default)s)")
    add("--seed", type=int, default=0, help="another one speaks the text otherwise (default: %(default)s)")
    add("--max-new-tokens", type=int, help="most frames to speak, 12.5 a second (default: as the model says)")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="(default: %(default)s)")
    add_consent(parser)
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> None:
    consent = require_consent(args, [])
    check_text(args.text)
    if args.output.suffix.lower() != ".wav":
        raise ValueError(f"--output {args.output}: a WAV file is written, name it .wav")
    if args.x_vector_only and args.ref_text:
        raise ValueError("--x-vector-only makes no use of --ref-text: leave one of them out")
    if args.trim_reference and args.ref_text:
        raise ValueError("--trim-reference with --ref-text: the text would say more than the cut recording; cut both")
    if args.max_new_tokens is not None and args.max_new_tokens < 2:
        raise ValueError(f"--max-new-tokens {args.max_new_tokens}: at least 2 are needed, 12.5 a second of speech")
    reference = load_reference(args.ref_audio, args.trim_reference)
    rate_hz = audio_info(args.ref_audio).sample_rate_hz
    if rate_hz < TELEPHONE_HZ:
        print(
            f"{args.ref_audio} has {rate_hz:,} Hz: what is above {rate_hz // 2:,} Hz is not in it, and not in the clone"
        )
    model = load_base(args.model, chosen_device(args.device))
    cloned = clone(model, args.text, reference, args.ref_text, args.language, args.seed, args.max_new_tokens)
    provenance = provenance_of(args.model, cloned.method, str(args.seed), str(consent["note"]))
    write_wav(args.output, cloned.wav, cloned.sample_rate_hz, provenance)
    print(cloned.summary())
    if warning := strange_letters([args.text]):
        print(warning)
    if cloned.cut_short:
        print("stopped by --max-new-tokens before the model had ended: the text may be cut short, give more")
    print(f"written: {args.output}, marked as synthetic in its metadata")


def provenance_of(model: str, method: str, seed: str, consent_note: str = "") -> dict[str, str]:
    """What a generated file says of itself."""
    consent = f"stated; {consent_note}" if consent_note else "stated"
    return {"synthetic": "yes", "model": model, "method": method, "seed": seed, "consent": consent}


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    try:
        run(args)
    except ValueError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
