"""Fine-tunes Qwen3-TTS to one or several voices: python train.py, torchrun train.py or keepstep run train.py.

keepstep run --workers 2 --strategy fsdp2 --precision bf16 train.py --codes voice/codes.jsonl \\
    --model-path Qwen/Qwen3-TTS-12Hz-0.6B-Base --i-have-consent
python export.py --run runs/NAME --output voice/voice-anna
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from audio import SAMPLE_RATE_HZ, load_audio
from batches import FrameBatches
from consent import add_consent, require_consent
from data import Limits, SameUtterances, Utterances, load_utterances, speaker_ids, split_by_text
from layout import Batch, Vocabulary, collate
from model import SUB_TALKER_WEIGHT, VoiceModel, add_lora, set_speaker
from qwen import BASE_MODELS, identity, import_qwen_tts, load_voice_model, local_folder, require_base
from rows import Row
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

import keepstep

WEIGHTS, ABOUT = "voice.safetensors", "voice.json"
"""What export.py reads of a run's artifacts: the best weights so far, and what they were made from."""
FRAMES_A_MINUTE = 60 * 12.5
REFERENCES = 8
"""Utterances whose speaker embeddings are averaged: one alone carries the mood it was said in."""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--codes", required=True, help="codes.jsonl of prepare.py")
    add("--model-path", default=BASE_MODELS[1], help="folder or hub id of a base model (default: %(default)s)")
    add("--speaker", nargs="+", default=[], help="train these speakers only (default: all in --codes)")
    add("--language", default="auto", help="one of the model's; use the same when generating (default: %(default)s)")
    add(
        "--streaming",
        action="store_true",
        help="train for text that comes in as it is spoken (non_streaming_mode=False)",
    )
    add("--num-epochs", type=int, default=10, help="at most (default: %(default)s)")
    add(
        "--patience", type=int, default=3, help="epochs without a better validation loss before it stops; 0: never stop"
    )
    add("--validation-share", type=float, default=0.05, help="of the texts, held out (default: %(default)s)")
    add("--batch-frames", type=int, default=2000, help="frames a step, of all workers together; 12.5 are a second")
    add("--accumulate", type=int, default=1, help="parts that a step's batch is computed in, to save memory")
    add("--learning-rate", type=float, help="the highest (default: 2e-6, or 1e-4 with LoRA)")
    add("--warmup-share", type=float, default=0.05, help="of the steps in which it rises; then it falls as a cosine")
    add("--weight-decay", type=float, default=0.01, help="of matrices (default: %(default)s)")
    add("--max-norm", type=float, default=1.0, help="gradients are clipped to this norm (default: %(default)s)")
    add("--lora-rank", type=int, default=0, help="train low-rank additions instead (16 is usual); 0: all weights")
    add("--ema-decay", type=float, default=0.0, help="keep and export an average of the weights, e.g. 0.99; 0: none")
    add("--num-workers", type=int, default=0, help="loader processes a worker")
    add_consent(parser)
    args = parser.parse_args(argv)
    if args.learning_rate is None:
        args.learning_rate = 1e-4 if args.lora_rank else 2e-6
    if not 0 <= args.validation_share < 1:
        parser.error(f"--validation-share {args.validation_share} must be from 0 to less than 1")
    return args


def load_model(args: argparse.Namespace, rows: list[Row], speakers: Mapping[str, int]) -> tuple[VoiceModel, Any]:
    """The talker with every speaker in its place, and the text tokenizer."""
    whole = load_voice_model(args.model_path, dtype=torch.float32)
    require_base(whole, args.model_path)
    talker = whole.model.talker
    for speaker, speaker_id in speakers.items():
        set_speaker(talker, speaker_id, speaker_embedding(whole, [row for row in rows if row["speaker"] == speaker]))
    model = VoiceModel(talker)
    if args.lora_rank:
        add_lora(model, args.lora_rank)
    return model.train(), whole.processor.tokenizer


def speaker_embedding(whole: Any, rows: list[Row]) -> Tensor:
    """The base model's embedding of a voice: the mean over some utterances, the longest, which tell most of it."""
    longest = sorted(rows, key=lambda row: (-len(row["audio_codes"]), row["audio"]))[:REFERENCES]
    embeddings = [whole.model.extract_speaker_embedding(load_audio(row["audio"]), SAMPLE_RATE_HZ) for row in longest]
    return torch.stack(embeddings).float().mean(0).clone()


def groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Weight decay for matrices only, and not for embeddings: it would shrink the rows that no batch uses."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    trained = [p for p in model.parameters() if p.requires_grad]
    decayed = [p for p in trained if p.dim() > 1 and id(p) not in tables]
    others = [p for p in trained if p.dim() <= 1 or id(p) in tables]
    return [
        {"params": params, "weight_decay": decay}
        for params, decay in ((decayed, weight_decay), (others, 0.0))
        if params
    ]


def rising_then_cosine(num_steps: int, warmup_share: float) -> Any:
    warmup = max(1, round(num_steps * warmup_share))

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, num_steps - warmup))))

    return factor


@dataclass
class BestSoFar:
    """The lowest validation loss, and for how many epochs it has not been beaten; saved with the run."""

    loss: float = math.inf
    stale: int = 0

    def improved(self, loss: float) -> bool:
        better = loss < self.loss
        self.loss, self.stale = (loss, 0) if better else (self.loss, self.stale + 1)
        return better

    def state_dict(self) -> dict[str, float]:
        return {"loss": self.loss, "stale": self.stale}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.loss, self.stale = float(state["loss"]), int(state["stale"])


@torch.no_grad()
def update_average(average: nn.Module, model: nn.Module, decay: float, steps: int) -> None:
    """`steps`: how many were made. Of the first ones less is kept: else a short run would export the base model."""
    decay = min(decay, (1 + steps) / (10 + steps))
    weights = model.state_dict()
    for name, value in average.state_dict().items():
        latest = weights[name].full_tensor() if hasattr(weights[name], "full_tensor") else weights[name]
        value.lerp_(latest.to(value), 1 - decay) if value.is_floating_point() else value.copy_(latest)


@torch.no_grad()
def validate(run: keepstep.Run, model: nn.Module, loader: DataLoader[Batch]) -> dict[str, float]:
    """Means over every held-out frame, however many workers share them."""
    model.eval()
    sums = torch.zeros(4, dtype=torch.float64, device=run.device)
    for batch in loader:
        losses = model(batch)
        sums += torch.stack([part.double().sum() for part in losses])
    model.train()
    talker, sub_talker, frames, right = run.sum(sums).tolist()
    talker, sub_talker = talker / frames, sub_talker / frames
    return {
        "validation_loss": talker + SUB_TALKER_WEIGHT * sub_talker,
        "validation_talker": talker,
        "validation_sub_talker": sub_talker,
        "validation_accuracy": right / frames,
    }


def in_words(figures: Mapping[str, float]) -> str:
    total, talker, sub_talker, right = figures.values()
    return (
        f"validation loss {total:.4f} (talker {talker:.4f}, sub-talker {sub_talker:.4f}), first codes right {right:.1%}"
    )


@dataclass
class Job:
    """What is trained, on what, and what is recorded of it."""

    model: VoiceModel
    train_set: Utterances
    test_set: Utterances
    batches: FrameBatches
    about: dict[str, Any]

    def __str__(self) -> str:
        speakers, held_out = ", ".join(self.about["speakers"]), len(self.about["held_out"])
        others = f"{held_out} held out by their text" if held_out else "none held out: validation is on the same"
        return f"{len(self.train_set)} utterances of {speakers} in {len(self.batches)} batches an epoch, {others}"


def set_up(args: argparse.Namespace) -> Job:
    """All that can be wrong with what was given is found here, and named by a ValueError."""
    limits, config = limits_of(args.model_path)
    rows = load_utterances(args.codes, limits, args.speaker)
    speakers = speaker_ids(sorted({row["speaker"] for row in rows}), config)
    consent = require_consent(args, speakers)
    vocabulary, language = Vocabulary.of(config), args.language.lower()
    vocabulary.tag(language)
    train_rows, held_out = split_by_text(rows, args.validation_share)
    model, tokenizer = load_model(args, train_rows, speakers)
    train_set, test_set = (
        Utterances(part, tokenizer, vocabulary, speakers, language, args.streaming)
        for part in (train_rows, held_out or train_rows)
    )
    about = {
        "base_model": args.model_path,
        "speakers": speakers,
        "language": language,
        "streaming": args.streaming,
        "lora_rank": args.lora_rank,
        "settings": {name: value for name, value in vars(args).items() if name not in ("codes", "consent_note")},
        "data": {"utterances": len(train_rows), "minutes": round(sum(train_set.num_frames) / FRAMES_A_MINUTE, 2)},
        "held_out": [{name: row[name] for name in ("audio", "text", "speaker")} for row in held_out],
        "consent": consent,
    }
    return Job(model, train_set, test_set, FrameBatches(train_set.num_frames, args.batch_frames), about)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    run = keepstep.start()
    try:
        job = set_up(args)
    except ValueError as error:
        sys.exit(f"train.py: {error}")
    # It plans each shape of a batch anew, for longer than a step takes, and batches here have many.
    torch.backends.cuda.enable_cudnn_sdp(False)
    model: nn.Module = job.model
    loader = DataLoader(job.train_set, batch_sampler=job.batches, collate_fn=collate, num_workers=args.num_workers)
    test = DataLoader(job.test_set, max(1, args.batch_frames // max(job.test_set.num_frames)), collate_fn=collate)
    optimizer = torch.optim.AdamW(groups(model, args.weight_decay), lr=args.learning_rate, betas=(0.9, 0.95))
    scheduler = LambdaLR(optimizer, rising_then_cosine(args.num_epochs * len(job.batches), args.warmup_share))
    average = copy.deepcopy(model).to(run.device).requires_grad_(False) if args.ema_decay else None
    if average is not None:
        run.track("ema", average)
    best = run.track("best", BestSoFar())
    run.track("utterances", SameUtterances(job.train_set.rows, args.batch_frames))
    model, optimizer, scheduler, loader, test = run.prepare(model, optimizer, scheduler, loader, test)
    if run.is_main:  # gigabytes are read for it
        job.about["base_identity"] = identity(local_folder(args.model_path))
    run.save(ABOUT, job.about)
    run.print(job)

    for epoch in run.epochs(args.num_epochs):
        for batch in run.steps(loader):
            for part in run.micro(batch, args.accumulate):
                losses = model(part)
                loss = (losses.total * part["scale"]).mean()
                run.backward(loss / args.accumulate)
                run.log(loss=loss, accuracy=losses.right.sum() / losses.frames.sum())
            run.log(gradient_norm=run.clip_grad_norm(model, args.max_norm), lr=scheduler.get_last_lr()[0])
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if average is not None:
                update_average(average, model, args.ema_decay, scheduler.last_epoch)
        validated = model if average is None else average
        figures = validate(run, validated, test)
        run.log(**figures)
        run.print(f"epoch {epoch}: {in_words(figures)}")
        if best.improved(figures["validation_loss"]):
            run.save(WEIGHTS, validated.state_dict())
        if args.patience and best.stale >= args.patience:
            run.print(f"no better for {best.stale} epochs: stopping; the best was {best.loss:.4f}")
            break


def limits_of(path_or_id: str) -> tuple[Limits, Any]:
    """What codes a model takes, from its configuration alone: wrong codes are named before weights are loaded."""
    import_qwen_tts()
    from qwen_tts.core.models import Qwen3TTSConfig

    config = Qwen3TTSConfig.from_pretrained(str(local_folder(path_or_id)))
    talker = config.talker_config
    return Limits(talker.num_code_groups, talker.code_predictor_config.vocab_size), config


if __name__ == "__main__":
    main()
