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
import os
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

import keepstep

sys.path[:0] = map(str, Path(__file__).resolve().parents[:2])
from audio import load_audio  # noqa: E402
from batches import FrameBatches  # noqa: E402
from data import split_by_text  # noqa: E402
from guided import BaseModel, GuidedUtterances, collate_guided, fewer_kernels, table_of  # noqa: E402
from layout import Vocabulary  # noqa: E402
from listener import sounds_of  # noqa: E402
from mel_codec import (  # noqa: E402
    SAMPLE_RATE_HZ,
    MelCodecConfig,
    MelCodecModel,
    mel_spectrogram,
    save_codec,
    train_codec,
)
from qwen import chosen_device, import_qwen_tts  # noqa: E402
from rows import Row, read_rows  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from sources import SUFFIXES  # noqa: E402
from tiny import build_text_tokenizer, save_model, speaker_encoder_settings, special_ids, talker_settings  # noqa: E402
from train import groups, rising_then_cosine, validate  # noqa: E402

REFERENCE_S, REFERENCES = 2.0, 16
ENCODED_AT_ONCE = 16
CODES, VOICES, ABOUT, WEIGHTS = "codes.npz", "references.pt", "corpus.json.gz", "base.safetensors"
GENERATION = {"max_new_tokens": 400, "repetition_penalty": 1.0, "temperature": 0.3, "subtalker_dosample": False}
"""A small model is unsure of fine detail, and drawing it at random makes noise of it; codes are few, so they recur."""


# -- the codec, and the corpus in its codes ---------------------------------------------------------------------------


def read_corpus(folders: Sequence[Path]) -> Iterator[tuple[Row, np.ndarray]]:
    for path in corpus_files(folders):
        yield from read_utterances(path)


def corpus_files(folders: Sequence[Path]) -> list[Path]:
    files = sorted(path for folder in folders for path in folder.glob("*.npy"))
    if not files:
        sys.exit(f"pretrain.py: {', '.join(map(str, folders))} has no corpus; voices.py makes one")
    return files


def read_utterances(path: Path) -> Iterator[tuple[Row, np.ndarray]]:
    wavs, at = np.load(path), 0
    with gzip.open(path.with_suffix(".json.gz"), "rt") as file:
        rows = json.load(file)
    for row in rows:
        yield row, wavs[at : at + row["samples"]]
        at += row["samples"]


def make_codec(args: argparse.Namespace) -> None:
    """Trains the codec on some of the corpus, and on recordings of real people if there are any."""
    device = chosen_device("auto")
    drawn = random.Random(0)
    recordings = (
        [path for path in sorted(args.recordings.rglob("*")) if path.suffix.lower() in SUFFIXES]
        if args.recordings
        else []
    )
    if args.recordings and not recordings:
        sys.exit(f"pretrain.py: {args.recordings} holds no recordings ({', '.join(SUFFIXES)})")
    try:  # what is given wrong is named before the corpus is read, which takes minutes
        chosen = [(row["text"], mel_of(row["audio"], device)) for path in args.spoken for row in read_rows(path)]
    except ValueError as error:
        sys.exit(f"pretrain.py: {error}")
    others = [mel_of(path, device) for path in recordings] * args.recordings_times
    corpus = ((row, wav) for row, wav in read_corpus(args.corpus) if drawn.random() < args.codec_share)
    chosen += [(row["text"], to_mel(wav, device)) for row, wav in corpus]
    try:
        said = sounds_of([text for text, _ in chosen])
    except ValueError as error:
        sys.exit(f"pretrain.py: {error}")
    spoken = [(mel, sounds) for (_, mel), sounds in zip(chosen, said, strict=True)]
    settings = MelCodecConfig(args.codebook_size, args.codebooks, args.codec_width)
    codec = train_codec(spoken, others, args.codec_steps, device, args.codec_batch, settings, args.listener_steps)
    save_codec(codec, args.output / "speech_tokenizer")


def encode_corpus(args: argparse.Namespace) -> None:
    """The corpus in the codec's codes, and for each speaker pieces to hear the voice from."""
    rows: list[Row] = []
    codes: list[np.ndarray] = []
    for own_rows, own_codes in encoded_files(corpus_files(args.corpus), args.output, chosen_device("auto")):
        rows += own_rows
        codes += own_codes
    beside = corpus_codes(args.output)
    beside.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(beside / CODES, codes=np.concatenate(codes), lengths=np.array([len(one) for one in codes]))
    references = references_of(args.corpus, {row["speaker"] for row in rows})
    torch.save(references, beside / VOICES)
    with gzip.open(beside / ABOUT, "wt") as file:
        json.dump(rows, file)
    tokenizer = build_text_tokenizer(" ".join(row["text"] for row in rows), args.vocab_size)
    tokenizer.save_pretrained(args.output)
    print(f"{len(rows):,} utterances, {sum(map(len, codes)):,} frames, {len(references)} speakers")


def corpus_codes(base: Path) -> Path:
    """Beside the model, not in it: what is in its folder goes with every voice that comes from it."""
    whole = base.resolve()  # of `.`, too
    return whole.with_name(f"{whole.name}-corpus")


def encoded_files(paths: list[Path], base: Path, device: str) -> Iterator[tuple[list[Row], list[np.ndarray]]]:
    """On a GPU one file after the other, else a core each."""
    each = (paths, [base] * len(paths), [device] * len(paths))
    if device != "cpu":
        yield from map(encode_file, *each)
        return
    cores = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(cores, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        yield from pool.map(encode_file, *each, chunksize=4)


@cache
def load_base_codec(folder: Path, device: str) -> MelCodecModel:
    return MelCodecModel.from_pretrained(folder / "speech_tokenizer").to(device).eval()


@torch.no_grad()
def encode_file(path: Path, base: Path, device: str) -> tuple[list[Row], list[np.ndarray]]:
    """(rows, codes) of one file of the corpus."""
    said = [(row, wav) for row, wav in read_utterances(path) if SAMPLE_RATE_HZ <= len(wav) < 14 * SAMPLE_RATE_HZ]
    codes: list[Tensor] = []
    for at in range(0, len(said), ENCODED_AT_ONCE):
        mels = [to_mel(wav, device) for _, wav in said[at : at + ENCODED_AT_ONCE]]
        codes += load_base_codec(base, device).encode_mels(mels)
    return [row for row, _ in said], [one.cpu().numpy().astype(np.int16) for one in codes]


def references_of(folders: Sequence[Path], speakers: Iterable[str]) -> dict[str, Tensor]:
    """Of each speaker the first pieces that are long enough; one who has none is left out."""
    found: dict[str, list[Tensor]] = {speaker: [] for speaker in speakers}
    num_samples = int(REFERENCE_S * SAMPLE_RATE_HZ)
    for row, wav in read_corpus(folders):
        own = found.get(row["speaker"])
        if own is not None and len(own) < REFERENCES and len(wav) >= num_samples:
            own.append(speaker_mel(wav[:num_samples].astype(np.float32) / 32768).half())
            if all(len(pieces) == REFERENCES for pieces in found.values()):
                break
    return {speaker: torch.stack(pieces) for speaker, pieces in found.items() if pieces}


def mel_of(path: str | Path, device: str) -> Tensor:
    return mel_spectrogram(torch.from_numpy(load_audio(path, SAMPLE_RATE_HZ)).to(device))


def to_mel(wav: np.ndarray, device: str) -> Tensor:
    return mel_spectrogram(torch.from_numpy(wav).to(device) / 32768)


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


def build(args: argparse.Namespace) -> tuple[Any, Any]:
    """(a whole Qwen3-TTS model, not yet trained; its text tokenizer)"""
    codec = MelCodecConfig.from_pretrained(args.output / "speech_tokenizer")
    import_qwen_tts()
    from qwen_tts.core.models import Qwen3TTSConfig, Qwen3TTSForConditionalGeneration
    from transformers import Qwen2TokenizerFast

    tokenizer = Qwen2TokenizerFast.from_pretrained(args.output)
    talker = talker_settings(len(tokenizer), codec.codebook_size, codec.num_quantizers, args.hidden_size, args.layers)
    talker["code_predictor_config"] |= {
        "hidden_size": args.sub_talker_size,
        "intermediate_size": 3 * args.sub_talker_size,
        "num_attention_heads": args.sub_talker_size // 64,
        "num_key_value_heads": max(1, args.sub_talker_size // 128),
        "num_hidden_layers": args.sub_talker_layers,
    }
    config = Qwen3TTSConfig(
        talker_config=talker,
        speaker_encoder_config=speaker_encoder_settings(args.hidden_size, channels=64),
        tokenizer_type="qwen3_tts_tokenizer_12hz",
        tts_model_size="small",
        tts_model_type="base",
        **special_ids(tokenizer),
    )
    return Qwen3TTSForConditionalGeneration(config), tokenizer


def load_rows(base: Path) -> tuple[list[Row], dict[str, Tensor]]:
    folder = corpus_codes(base)
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
    if args.begin_with:
        load_weights(whole, args.begin_with)
    fewer_kernels()
    run.print(f"{sum(p.numel() for p in whole.parameters()) / 1e6:.1f} M parameters, {len(rows):,} utterances")
    train_rows, test_rows = split_by_text(rows, 0.01)
    vocabulary = Vocabulary.of(whole.config)
    references, pieces = table_of(pools)
    train_set, test_set = (
        GuidedUtterances(part, tokenizer, vocabulary, pieces) for part in (train_rows, test_rows[:512])
    )
    batches = FrameBatches(train_set.num_frames, args.batch_frames)
    train = DataLoader(
        train_set,
        batch_sampler=batches,
        collate_fn=collate_guided,
        num_workers=args.num_workers,
        persistent_workers=args.num_workers > 0,
    )
    test = DataLoader(test_set, 256, collate_fn=collate_guided)
    model: nn.Module = BaseModel(whole.talker, whole.speaker_encoder, references, args.sub_talker_share)
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
        misread = validate(run, model, [batch | {"text_ids": batch["text_ids"].roll(1, 0)} for batch in test])
        # What the words count for: how much worse it gets with the text of another utterance.
        figures["validation_text"] = misread["validation_talker"] - figures["validation_talker"]
        run.log(**figures)
        run.print(" ".join(f"{name.removeprefix('validation_')} {value:.3f}" for name, value in figures.items()))
        # After each epoch, so that one that is stopped has some as well.
        run.save(WEIGHTS, {name: value.bfloat16() for name, value in model.state_dict().items()})


def load_weights(whole: Any, run: Path) -> None:
    state = load_file(run / "artifacts" / WEIGHTS)
    whole.load_state_dict({name: value.float() for name, value in state.items()})


def save_base(args: argparse.Namespace) -> None:
    whole, tokenizer = build(args)
    load_weights(whole, args.run)
    tokenizer.save_pretrained(args.output)
    save_model(whole, args.output)
    (args.output / "generation_config.json").write_text(json.dumps(GENERATION, indent=2) + "\n")
    print(f"written: {args.output}")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("stage", choices=("codec", "codes", "talker", "save"))
    add("--corpus", type=Path, nargs="+", default=[Path("corpus")])
    add("--output", type=Path, default=Path("base"))
    add("--run", type=Path, help="of which `save` takes the weights")
    add("--begin-with", type=Path, help="a run whose weights `talker` goes on from, with a schedule of its own")
    add("--codec-steps", type=int, default=3000)
    add("--listener-steps", type=int, default=3000, help="for the codec's first codebook: what is said")
    add("--codec-batch", type=int, default=128, help="windows of 32 frames")
    add("--codec-share", type=float, default=0.2, help="of the corpus, for the codec")
    add("--codebook-size", type=int, default=1024)
    add("--codebooks", type=int, default=8)
    add("--codec-width", type=int, default=512)
    add("--recordings", type=Path, help="a folder with recordings of real people, for the codec")
    add("--spoken", type=Path, nargs="+", default=[], help="rows of audio and text, as segments.jsonl, for the codec")
    add("--recordings-times", type=int, default=4, help="how often they count: there are few of them")
    add("--steps", type=int, default=5_000)
    add("--batch-frames", type=int, default=28_000)
    add("--learning-rate", type=float, default=1e-3)
    add("--hidden-size", type=int, default=512)
    add("--layers", type=int, default=6)
    add("--sub-talker-size", type=int, default=256)
    add("--sub-talker-layers", type=int, default=4)
    add("--sub-talker-share", type=float, default=0.5, help="of the frames, that it is trained on each step")
    add("--vocab-size", type=int, default=600, help="of text tokens; they must come in faster than they are said")
    add("--num-workers", type=int, default=0)
    args = parser.parse_args(argv)
    if args.stage == "save" and args.run is None:
        parser.error("save needs --run, whose weights it takes")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    {"codec": make_codec, "codes": encode_corpus, "talker": train_talker, "save": save_base}[args.stage](args)


if __name__ == "__main__":
    main()
