"""Fits the decoder of a voice's codec to the recordings that the voice was trained on; what are codes stays as it is.

python fit_decoder.py --voice voice-joe --codes joe/codes.jsonl

A codec that has heard thousands of people decodes any voice; mel_codec.py's has heard a few, and gives a new one back
with something of theirs. And it takes each code at its word, where a small talker is sure of a frame's first code only:
so the decoder learns from the codes that the voice itself puts after the first one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path[:0] = map(str, Path(__file__).resolve().parents[:2])
from audio import load_audio  # noqa: E402
from data import Limits, Utterances, load_utterances, split_by_text  # noqa: E402
from layout import Vocabulary, collate  # noqa: E402
from mel_codec import (  # noqa: E402
    FLOOR,
    MELS_PER_FRAME,
    SAMPLE_RATE_HZ,
    MelCodecModel,
    mel_error,
    mel_spectrogram,
    save_codec,
)
from model import VoiceModel  # noqa: E402
from qwen import chosen_device, load_voice_model, wants_whole_text  # noqa: E402
from rows import Row  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

WINDOW = 32
"""Frames that are decoded together."""
HELD_OUT = 0.05
"""The share of the texts that train.py keeps aside, too: neither talker nor decoder has learnt from these."""


@torch.no_grad()
def chosen_codes(voice: Any, rows: Sequence[Row]) -> list[Tensor]:
    """Of each recording the codes that the voice puts after the first one of each frame, given all that came before."""
    config, model = voice.model.config, VoiceModel(voice.model.talker).eval()
    speakers = config.talker_config.spk_id
    streaming = not wants_whole_text(voice)
    utterances = Utterances(list(rows), voice.processor.tokenizer, Vocabulary.of(config), speakers, "auto", streaming)
    chosen: list[Tensor] = []
    for batch in DataLoader(utterances, 32, collate_fn=collate):
        batch = {name: value.to(voice.device) for name, value in batch.items()}
        hidden = model.hidden_states(batch)
        learnt = model.frames_learnt(batch)
        before = hidden[:, :-1][learnt[:, 1:]]
        codes = batch["codes"][learnt]
        for number in range(1, codes.shape[1]):
            codes[:, number] = model.sub_talker_logits(before, codes)[:, number - 1].argmax(-1)
        chosen += codes.split(learnt.sum(1).tolist())
    return chosen


def frames_of(codec: MelCodecModel, rows: Sequence[Row], codes: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """(what the decoder gets, what it should make of it) of every frame, one recording after the other."""
    latents, patches = [], []
    for row, own in zip(rows, codes, strict=True):
        mel = mel_spectrogram(torch.from_numpy(load_audio(row["audio"], SAMPLE_RATE_HZ)).to(own.device))
        missing = len(own) * MELS_PER_FRAME - mel.shape[1]
        patches.append(codec.patches(F.pad(mel, (0, missing), value=FLOOR)[None])[0])
        latents.append(codec.quantizer.decode(own))
    return torch.cat(latents), torch.cat(patches)


def fit_decoder(codec: MelCodecModel, latents: Tensor, patches: Tensor, num_steps: int, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(codec.decoder.parameters(), lr=4e-4, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-4, num_steps)
    for _ in range(num_steps):
        starts = torch.randint(len(latents) - WINDOW, (16, 1), generator=generator)
        window = (starts + torch.arange(WINDOW)).to(latents.device)
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
    parser.add_argument("--steps", type=int, default=3000)
    args = parser.parse_args(argv)
    try:
        voice = load_voice_model(str(args.voice), chosen_device("auto"), torch.float32)
        talker = voice.model.config.talker_config
        limits = Limits(talker.num_code_groups, talker.code_predictor_config.vocab_size)
        rows = load_utterances(args.codes, limits, list(talker.spk_id))
    except (ValueError, OSError) as error:
        sys.exit(f"fit_decoder.py: {error}")
    trained, kept_aside = split_by_text(rows, HELD_OUT)
    if not kept_aside:
        sys.exit(f"fit_decoder.py: {args.codes} has one text; one is learnt from and another kept aside")
    if (num_frames := sum(len(row["audio_codes"]) for row in trained)) <= WINDOW:
        sys.exit(f"fit_decoder.py: {args.codes} has {num_frames} frames to learn from; more than {WINDOW} are needed")
    codec = voice.model.speech_tokenizer.model
    codec.requires_grad_(False).decoder.requires_grad_(True)
    with torch.no_grad():
        held_out, learnt = (frames_of(codec, part, chosen_codes(voice, part)) for part in (kept_aside, trained))
    before = decoding_error(codec, *held_out)
    fit_decoder(codec, *learnt, args.steps)
    after = decoding_error(codec, *held_out)
    save_codec(codec, args.voice / "speech_tokenizer")
    aside = f"{len(kept_aside)} recordings kept aside"
    print(f"{args.voice}: error of {aside} {before:.3f} of a deviation, now {after:.3f}")


if __name__ == "__main__":
    main()
