"""Trains a small Qwen3-TTS base model from nothing, codec included, on the voices that voices.py made.

python pretrain.py codec --corpus corpus --output base       # the codec
python pretrain.py codes --corpus corpus --output base       # the corpus in its codes
keepstep run pretrain.py talker --output base --steps 10000  # talker, sub-talker and speaker encoder
python pretrain.py save --output base --run runs/NAME        # as a base model that every stage of the recipe takes
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

import keepstep

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
from audio import load_audio  # noqa: E402
from batches import FrameBatches  # noqa: E402
from data import Utterances, split_by_text  # noqa: E402
from layout import Batch, Vocabulary, collate  # noqa: E402
from mel_codec import (  # noqa: E402
    SAMPLE_RATE_HZ,
    MelCodecConfig,
    MelCodecModel,
    mel_spectrogram,
    save_codec,
    train_codec,
)
from model import VoiceModel  # noqa: E402
from qwen import import_qwen_tts  # noqa: E402
from rows import Row  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from tiny import build_text_tokenizer, save_model, speaker_encoder_settings, special_ids, talker_settings  # noqa: E402
from train import groups, rising_then_cosine, validate  # noqa: E402

REFERENCE_S, REFERENCES = 2.5, 64
ENCODED_AT_ONCE = 128
CODES, VOICES, ABOUT = "codes.npz", "references.pt", "corpus.json.gz"
SPEAKER_SLOT = 6
"""Where the speaker's embedding stands, without a language: three role tokens and three of the tag come before."""


# -- the codec, and the corpus in its codes ---------------------------------------------------------------------------


def read_corpus(folders: Sequence[Path]) -> Iterator[tuple[Row, np.ndarray]]:
    for path in sorted(path for folder in folders for path in folder.glob("*.npy")):
        wavs, at = np.load(path), 0
        with gzip.open(path.with_suffix("").with_suffix(".json.gz"), "rt") as file:
            rows = json.load(file)
        for row in rows:
            yield row, wavs[at : at + row["samples"]]
            at += row["samples"]


def make_codec(args: argparse.Namespace) -> None:
    """Trains the codec on some of the corpus, and on recordings of real people if there are any."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    drawn = random.Random(0)
    chosen = [to_mel(wav, device) for _, wav in read_corpus(args.corpus) if drawn.random() < args.codec_share]
    chosen += [to_mel(wav, device) for wav in read_recordings(args.recordings)] * args.recordings_times
    codec = train_codec(chosen, args.codec_steps, device, args.codec_batch, codebook_size=args.codebook_size)
    save_codec(codec, args.output / "speech_tokenizer")


def encode_corpus(args: argparse.Namespace) -> None:
    """The corpus in the codec's codes, and for each speaker pieces to hear the voice from."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    codec = MelCodecModel.from_pretrained(args.output / "speech_tokenizer").to(device).eval()
    rows, codes, references = [], [], defaultdict(list)
    waiting: list[Tensor] = []

    @torch.no_grad()
    def encode_waiting() -> list[np.ndarray]:
        encoded = [one.cpu().numpy().astype(np.int16) for one in codec.encode_mels(waiting)]
        waiting.clear()
        return encoded

    for row, wav in read_corpus(args.corpus):
        if not SAMPLE_RATE_HZ <= len(wav) < 14 * SAMPLE_RATE_HZ:
            continue
        waiting.append(to_mel(wav, device))
        rows.append(row)
        if len(waiting) == ENCODED_AT_ONCE:
            codes += encode_waiting()
        if len(references[row["speaker"]]) < REFERENCES and len(wav) >= REFERENCE_S * SAMPLE_RATE_HZ:
            piece = wav[: int(REFERENCE_S * SAMPLE_RATE_HZ)].astype(np.float32) / 32768
            references[row["speaker"]].append(speaker_mel(piece).half())
    codes += encode_waiting() if waiting else []
    np.savez(args.output / CODES, codes=np.concatenate(codes), lengths=np.array([len(one) for one in codes]))
    torch.save({name: torch.stack(pool) for name, pool in references.items() if pool}, args.output / VOICES)
    with gzip.open(args.output / ABOUT, "wt") as file:
        json.dump(rows, file)
    print(f"{len(rows):,} utterances, {sum(map(len, codes)):,} frames, {len(references)} speakers")


def to_mel(wav: np.ndarray, device: torch.device) -> Tensor:
    return mel_spectrogram(torch.from_numpy(wav.astype(np.float32) / 32768).to(device))


def read_recordings(folder: Path | None) -> Iterator[np.ndarray]:
    """Recordings as the corpus has its utterances: 16-bit samples at 22,050 Hz."""
    for path in sorted(folder.rglob("*.*")) if folder else ():
        yield (load_audio(path, SAMPLE_RATE_HZ) * 32767).astype(np.int16)


def speaker_mel(wav: np.ndarray) -> Tensor:
    """What Qwen3-TTS's speaker encoder takes, of audio at 22,050 Hz."""
    import_qwen_tts()
    import soxr
    from qwen_tts.core.models.modeling_qwen3_tts import mel_spectrogram as speaker_mel_spectrogram

    at_24_khz = torch.from_numpy(soxr.resample(wav, SAMPLE_RATE_HZ, 24_000))
    return speaker_mel_spectrogram(
        at_24_khz[None],
        n_fft=1024,
        num_mels=128,
        sampling_rate=24_000,
        hop_size=256,
        win_size=1024,
        fmin=0,
        fmax=12_000,
    )[0].T


# -- talker, sub-talker, speaker encoder ------------------------------------------------------------------------------


class BaseModel(VoiceModel):
    """A voice model whose speaker is heard from another utterance, not looked up."""

    def __init__(self, talker: nn.Module, speaker_encoder: nn.Module) -> None:
        super().__init__(talker)
        self.speaker_encoder = speaker_encoder

    def codec_embeddings(self, batch: Batch) -> Tensor:
        codec = super().codec_embeddings(batch)
        speaker = self.speaker_encoder(batch["reference"].to(codec.dtype))
        position = torch.arange(codec.shape[1], device=codec.device)[:, None]
        return torch.where(position == SPEAKER_SLOT, speaker[:, None].to(codec.dtype), codec)


class WithReference(Utterances):
    """Utterances, each with a piece of another one of the same speaker."""

    def __init__(self, rows: list[Row], tokenizer: Any, vocabulary: Vocabulary, pools: dict[str, Tensor]) -> None:
        super().__init__(rows, tokenizer, vocabulary, dict.fromkeys(pools, 0), streaming=True)
        self._pools = pools

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        pool = self._pools[self.rows[index]["speaker"]]
        chosen = pool[int(torch.randint(len(pool), ()))]
        return super().__getitem__(index) | {"reference": chosen.float()}


def build(args: argparse.Namespace) -> tuple[Any, Any]:
    """(a whole Qwen3-TTS model, not yet trained; its text tokenizer)"""
    num_codes = MelCodecConfig.from_pretrained(args.output / "speech_tokenizer").codebook_size
    import_qwen_tts()
    from qwen_tts.core.models import Qwen3TTSConfig, Qwen3TTSForConditionalGeneration

    # Hardly more than single letters: what a small model has to learn is how they are pronounced.
    tokenizer = build_text_tokenizer("", vocab_size=270)
    talker = talker_settings(len(tokenizer), num_codes, 16, args.hidden_size, args.layers)
    talker["code_predictor_config"] |= {
        "hidden_size": args.sub_talker_size,
        "intermediate_size": 3 * args.sub_talker_size,
        "num_attention_heads": args.sub_talker_size // 64,
        "num_key_value_heads": max(1, args.sub_talker_size // 128),
        "num_hidden_layers": args.sub_talker_layers,
    }
    config = Qwen3TTSConfig(
        talker_config=talker,
        speaker_encoder_config=speaker_encoder_settings(args.hidden_size, channels=128),
        tokenizer_type="qwen3_tts_tokenizer_12hz",
        tts_model_size="small",
        tts_model_type="base",
        **special_ids(tokenizer),
    )
    return Qwen3TTSForConditionalGeneration(config), tokenizer


def load_rows(folder: Path) -> tuple[list[Row], dict[str, Tensor]]:
    with gzip.open(folder / ABOUT, "rt") as file:
        rows = json.load(file)
    saved = np.load(folder / CODES)
    codes = np.split(saved["codes"].astype(np.int64), np.cumsum(saved["lengths"])[:-1])
    pools = torch.load(folder / VOICES, weights_only=True)
    rows = [row | {"audio_codes": one} for row, one in zip(rows, codes, strict=True) if row["speaker"] in pools]
    return rows, pools


def train_talker(args: argparse.Namespace) -> None:
    run = keepstep.start()
    torch.backends.cuda.enable_cudnn_sdp(False)  # as in train.py
    rows, pools = load_rows(args.output)
    whole, tokenizer = build(args)
    run.print(f"{sum(p.numel() for p in whole.parameters()) / 1e6:.1f} M parameters, {len(rows):,} utterances")
    train_rows, test_rows = split_by_text(rows, 0.01)
    vocabulary = Vocabulary.of(whole.config)
    train_set = WithReference(train_rows, tokenizer, vocabulary, pools)
    test_set = WithReference(test_rows[:512], tokenizer, vocabulary, pools)
    batches = FrameBatches(train_set.num_frames, args.batch_frames)
    options = {"collate_fn": collate, "num_workers": args.num_workers, "persistent_workers": args.num_workers > 0}
    train, test = DataLoader(train_set, batch_sampler=batches, **options), DataLoader(test_set, 64, collate_fn=collate)
    model: nn.Module = BaseModel(whole.talker, whole.speaker_encoder)
    fused = run.device.type == "cuda"
    optimizer = torch.optim.AdamW(groups(model, 0.05), lr=args.learning_rate, betas=(0.9, 0.95), fused=fused)
    scheduler = LambdaLR(optimizer, rising_then_cosine(args.steps, 0.03))
    model, optimizer, scheduler, train, test = run.prepare(model, optimizer, scheduler, train, test)
    for _ in run.epochs(-(-args.steps // len(batches))):
        for batch in run.steps(train):
            losses = model(batch)
            loss = (losses.total * batch["scale"]).mean()
            run.backward(loss)
            run.clip_grad_norm(model, 1.0)
            run.log(loss=loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if run.step + 1 >= args.steps:
                break
        figures = validate(run, model, test)
        run.log(**figures)
        run.print(" ".join(f"{name.removeprefix('validation_')} {value:.3f}" for name, value in figures.items()))
    run.save("base.safetensors", {name: value.bfloat16() for name, value in model.state_dict().items()})


def save_base(args: argparse.Namespace) -> None:
    whole, tokenizer = build(args)
    state = load_file(args.run / "artifacts" / "base.safetensors")
    whole.load_state_dict({name: value.float() for name, value in state.items()})
    tokenizer.save_pretrained(args.output)
    save_model(whole, args.output)
    print(f"written: {args.output}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("stage", choices=("codec", "codes", "talker", "save"))
    add("--corpus", type=Path, nargs="+", default=[Path("corpus")])
    add("--output", type=Path, default=Path("base"))
    add("--run", type=Path)
    add("--codec-steps", type=int, default=6000)
    add("--codec-batch", type=int, default=256, help="windows of 16 frames")
    add("--codec-share", type=float, default=0.2, help="of the corpus, for the codec")
    add("--codebook-size", type=int, default=512)
    add("--recordings", type=Path, help="a folder with recordings of real people, for the codec")
    add("--recordings-times", type=int, default=4, help="how often they count: there are few of them")
    add("--steps", type=int, default=10_000)
    add("--batch-frames", type=int, default=16_000)
    add("--learning-rate", type=float, default=1e-3)
    add("--hidden-size", type=int, default=384)
    add("--layers", type=int, default=8)
    add("--sub-talker-size", type=int, default=256)
    add("--sub-talker-layers", type=int, default=4)
    add("--num-workers", type=int, default=0)
    args = parser.parse_args(argv)
    {"codec": make_codec, "codes": encode_corpus, "talker": train_talker, "save": save_base}[args.stage](args)


if __name__ == "__main__":
    main()
