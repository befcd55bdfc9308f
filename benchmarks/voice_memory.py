"""What a step of voice training really takes of a GPU, against what recipes/qwen3_tts/fits.py says without one.

    python benchmarks/voice_memory.py --output benchmarks/results/DATE-h200-voice-memory.json

Models of the real sizes with random weights: memory and speed do not depend on what they have learnt.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes" / "qwen3_tts"))
import fits
from layout import Vocabulary, build_sample, collate
from model import VoiceModel, add_lora
from train import groups

UTTERANCE_FRAMES, TEXT_TOKENS = 75, 22
"""6 s of speech."""
NUM_STEPS = 6


def measure(config: Any, how: str, frames: int, lora_rank: int) -> dict[str, float]:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.backends.cuda.enable_cudnn_sdp(False)
    with torch.device("cuda"):
        model = VoiceModel(fits.build_talker(config)).train()
    if how == "LoRA":
        add_lora(model, lora_rank)
        model.cuda()
    optimizer = torch.optim.AdamW(groups(model, 0.01), lr=1e-6, fused=True)
    codes = np.random.default_rng(0).integers(0, 2048, (UTTERANCE_FRAMES, 16))
    sample = build_sample([1] * (8 + TEXT_TOKENS), codes, 3000, Vocabulary.of(config))
    batch = {name: value.cuda() for name, value in collate([sample] * (frames // UTTERANCE_FRAMES)).items()}
    for step in range(NUM_STEPS):
        if step == 2:
            torch.cuda.synchronize()
            began = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16):
            losses = model(batch)
        (losses.total.sum() / losses.frames.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    took_s = (time.perf_counter() - began) / (NUM_STEPS - 2)
    return {"gigabytes": torch.cuda.max_memory_allocated() / 1e9, "seconds_a_step": took_s}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=list(fits.SIZES), choices=fits.SIZES)
    parser.add_argument("--frames", nargs="+", type=int, default=[600, 1950])
    parser.add_argument("--lora-rank", type=int, default=16)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        sys.exit("a CUDA device is needed: recipes/qwen3_tts/fits.py estimates without one")
    found = []
    print(f"{'model':6} {'how':10} {'frames':>6} {'GB':>6} {'fits.py':>8} {'ratio':>6} {'frames/s':>9}")
    for size in args.sizes:
        config = fits.named_config(size)
        kept = fits.measure(config)
        for how in ("LoRA", "full, ddp"):
            for frames in args.frames:
                row = measure(config, how, frames, args.lora_rank)
                said = fits.gigabytes(config, kept, how, 1, frames, args.lora_rank)
                row |= {"model": size, "how": how, "frames": frames, "said": said, "ratio": row["gigabytes"] / said}
                found.append(row)
                speed = frames / row["seconds_a_step"]
                print(
                    f"{size:6} {how:10} {frames:6} {row['gigabytes']:6.1f} {said:8.1f} {row['ratio']:6.2f} {speed:9.0f}"
                )
    if args.output:
        about = {"machine": torch.cuda.get_device_name(0), "torch": torch.__version__, "command": " ".join(sys.argv)}
        args.output.write_text(json.dumps(about | {"rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
