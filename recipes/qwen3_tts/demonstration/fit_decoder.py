"""Fits the decoder of a voice's codec to the recordings that the voice was trained on; its codes stay as they are.

python fit_decoder.py --voice voice-joe --codes joe/codes.jsonl

A codec that has heard thousands of people decodes any voice; mel_codec.py's has heard some forty, and gives a new one
back with something of theirs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path[:0] = map(str, Path(__file__).resolve().parents[:2])
from audio import load_audio  # noqa: E402
from mel_codec import (  # noqa: E402
    FLOOR,
    MELS_PER_FRAME,
    SAMPLE_RATE_HZ,
    MelCodecModel,
    mel_error,
    mel_spectrogram,
    save_codec,
)
from rows import Row, read_rows  # noqa: E402

WINDOW = 32
"""Frames that are decoded together."""
HELD_OUT = 10
"""Of so many recordings one is kept aside, to say what was gained."""


def frames_of(codec: MelCodecModel, rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
    """(what the decoder gets, what it should make of it) of every frame, one recording after the other."""
    latents, patches = [], []
    for row in rows:
        codes = torch.tensor(row["audio_codes"])
        mel = mel_spectrogram(torch.from_numpy(load_audio(row["audio"], SAMPLE_RATE_HZ)))
        missing = len(codes) * MELS_PER_FRAME - mel.shape[1]
        patches.append(codec.patches(F.pad(mel, (0, missing), value=FLOOR)[None])[0])
        latents.append(codec.quantizer.decode(codes))
    return torch.cat(latents), torch.cat(patches)


def fit_decoder(codec: MelCodecModel, latents: Tensor, patches: Tensor, num_steps: int, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(codec.decoder.parameters(), lr=4e-4, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-4, num_steps)
    for _ in range(num_steps):
        starts = torch.randint(len(latents) - WINDOW, (16, 1), generator=generator)
        window = starts + torch.arange(WINDOW)
        mel_error(codec.decoded(latents[window]) - patches[window]).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


@torch.no_grad()
def decoding_error(codec: MelCodecModel, latents: Tensor, patches: Tensor) -> float:
    return float((codec.decoded(latents[None])[0] - patches).abs().mean())


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--voice", type=Path, required=True, help="an exported voice; its speech_tokenizer/ is changed")
    parser.add_argument("--codes", type=Path, required=True, help="codes.jsonl of prepare.py, as for train.py")
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args(argv)
    folder = args.voice / "speech_tokenizer"
    try:
        rows = read_rows(args.codes, needed=("audio", "audio_codes"))
        codec = MelCodecModel.from_pretrained(folder).eval()
    except (ValueError, OSError) as error:
        sys.exit(f"fit_decoder.py: {error}")
    kept_aside, trained = rows[::HELD_OUT], [row for number, row in enumerate(rows) if number % HELD_OUT]
    if (num_frames := sum(len(row["audio_codes"]) for row in trained)) <= WINDOW:
        sys.exit(f"fit_decoder.py: {args.codes} has {num_frames} frames to learn from; more than {WINDOW} are needed")
    codec.requires_grad_(False).decoder.requires_grad_(True)
    with torch.no_grad():
        held_out, learnt = frames_of(codec, kept_aside), frames_of(codec, trained)
    before = decoding_error(codec, *held_out)
    fit_decoder(codec, *learnt, args.steps)
    after = decoding_error(codec, *held_out)
    save_codec(codec, folder)
    print(f"{folder}: error of {len(kept_aside)} recordings kept aside {before:.3f} of a deviation, now {after:.3f}")


if __name__ == "__main__":
    main()
