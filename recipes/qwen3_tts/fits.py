"""Says what fine-tuning a Qwen3-TTS model takes of a GPU's memory, without a GPU and without its weights.

python fits.py                          # the 1.7 B and the 0.6 B model
python fits.py --model-path FOLDER --batch-frames 4000 --workers 1 2 8

Weights, gradients and Adam's moments are counted from the configuration. What a step keeps for its backward pass is
measured: one and two layers of the model are run here on a few frames, and what grows with both is scaled up.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from layout import Vocabulary, build_sample, collate
from model import VoiceModel
from qwen import import_qwen_tts, local_folder
from torch import Tensor

GPUS_GB = {"T4": 16, "L4, 4090": 24, "A100-40": 40, "L40S": 48, "A100-80, H100": 80, "H200": 141}
SPARE = 0.92
"""Of a GPU's memory; the driver, the context and what lies between blocks take the rest."""
SIZES = {
    "1.7B": {"hidden_size": 2048, "intermediate_size": 6144},
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072},
}
"""Of the base models' talkers, as their family has them; a downloaded one's own configuration overrules it."""
CODEC_IDS = ("pad_id", "bos_id", "eos_token_id", "think_id", "nothink_id", "think_bos_id", "think_eos_id")
"""What stands above the codebook in the codec's table."""
TRIED_FRAMES = 24
TEXT_PER_FRAME = 0.3
"""Text tokens a frame: 3 to 4 a second, at 12.5 frames."""


@dataclass(frozen=True)
class Kept:
    """Bytes that a step keeps for its backward pass: for each frame, text token included."""

    fixed: float
    a_layer: float
    a_sub_layer: float

    def a_frame(self, layers: int, sub_layers: int) -> float:
        return self.fixed + layers * self.a_layer + sub_layers * self.a_sub_layer


def named_config(size: str) -> Any:
    import_qwen_tts()
    from qwen_tts.core.models import Qwen3TTSConfig

    shared = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "num_code_groups": 16}
    predictor = shared | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 5, "vocab_size": 2048}
    talker = shared | SIZES[size] | {"num_hidden_layers": 28, "vocab_size": 3072, "text_vocab_size": 151_936}
    rope = {"rope_type": "default", "mrope_section": [24, 20, 20], "interleaved": True}
    ids = {"codec_language_id": {}, "spk_id": {}, "spk_is_dialect": {}, "pad_token_id": None}
    ids |= {f"codec_{name}": predictor["vocab_size"] + number for number, name in enumerate(CODEC_IDS, 100)}
    settings = talker | ids | {"rope_scaling": rope, "code_predictor_config": predictor, "text_hidden_size": 2048}
    return Qwen3TTSConfig(talker_config=settings, tts_model_type="base", tts_model_size=size)


def read_config(path_or_id: str) -> Any:
    import_qwen_tts()
    from qwen_tts.core.models import Qwen3TTSConfig

    return Qwen3TTSConfig.from_pretrained(str(local_folder(path_or_id)))


def num_parameters(config: Any) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build_talker(config).parameters())


def build_talker(config: Any) -> Any:
    from qwen_tts.core.models.modeling_qwen3_tts import Qwen3TTSTalkerForConditionalGeneration

    return Qwen3TTSTalkerForConditionalGeneration(config.talker_config)


def measure(config: Any) -> Kept:
    """By running the model with one layer each, then with a second in the talker, then with one in the sub-talker."""
    one, two, sub_two = (_kept_bytes(config, *layers) / TRIED_FRAMES for layers in ((1, 1), (2, 1), (1, 2)))
    a_layer, a_sub_layer = two - one, sub_two - one
    return Kept(one - a_layer - a_sub_layer, a_layer, a_sub_layer)


def _kept_bytes(config: Any, layers: int, sub_layers: int) -> int:
    from copy import deepcopy

    small = deepcopy(config)
    talker = small.talker_config
    predictor = talker.code_predictor_config
    talker.num_hidden_layers, predictor.num_hidden_layers = layers, sub_layers
    predictor.layer_types = ["full_attention"] * sub_layers
    talker.text_vocab_size = 64  # a table's size changes nothing in what is kept
    small.tts_pad_token_id, small.tts_bos_token_id, small.tts_eos_token_id = 61, 62, 63
    model = VoiceModel(build_talker(small))
    codes = torch.zeros(TRIED_FRAMES, talker.num_code_groups, dtype=torch.long).numpy()
    sample = build_sample([1] * (8 + int(TEXT_PER_FRAME * TRIED_FRAMES)), codes, 0, Vocabulary.of(small))
    # Weights, and the bf16 copies of them that autocast makes, are counted elsewhere: they do not grow with frames.
    weights = {parameter.numel() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if tensor.numel() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with (
        torch.autocast("cpu", torch.bfloat16),
        torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
    ):
        losses = model(collate([sample]))
    total = sum(kept.values())
    del losses  # not before: memory that was free again would have been counted once for two tensors
    return total


def gigabytes(config: Any, kept: Kept, how: str, workers: int, frames: float, lora_rank: int) -> float:
    """Of each GPU: what is there all the time, and what a step adds."""
    talker = config.talker_config
    step = frames / workers * kept.a_frame(talker.num_hidden_layers, talker.code_predictor_config.num_hidden_layers)
    count = num_parameters(config)
    trained = _lora_parameters(config, lora_rank) if how == "LoRA" else count
    frozen = count - trained if how == "LoRA" else 0
    sharded = workers if how == "full, fsdp2" else 1
    # fp32 weights, gradients and two moments; bf16 copies of the weights while a step lasts
    static = (16 * trained + 4 * frozen) / sharded + 2 * (trained + frozen) / sharded
    return (static + step) / 1e9


def _lora_parameters(config: Any, rank: int) -> int:
    total = 0
    for part in (config.talker_config, config.talker_config.code_predictor_config):
        hidden, inner = part.hidden_size, part.intermediate_size
        head = getattr(part, "head_dim", None) or hidden // part.num_attention_heads
        queries, keys = part.num_attention_heads * head, part.num_key_value_heads * head
        shapes = [(hidden, queries), (hidden, keys), (hidden, keys), (queries, hidden)]
        shapes += [(hidden, inner), (hidden, inner), (inner, hidden)]
        total += part.num_hidden_layers * sum(rank * (a + b) for a, b in shapes)
    return total


def smallest_gpu(needed_gb: float) -> str:
    return next((name for name, size in GPUS_GB.items() if needed_gb <= SPARE * size), "more workers, or LoRA")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", help="folder or hub id (default: both sizes of the base models)")
    parser.add_argument("--batch-frames", type=int, default=2000, help="as of train.py (default: %(default)s)")
    parser.add_argument("--accumulate", type=int, default=1, help="as of train.py (default: %(default)s)")
    parser.add_argument("--lora-rank", type=int, default=16, help="(default: %(default)s)")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8], help="(default: 1 2 4 8)")
    args = parser.parse_args(argv)
    try:
        path = args.model_path
        configs = {path: read_config(path)} if path else {size: named_config(size) for size in SIZES}
    except ValueError as error:
        sys.exit(f"fits.py: {error}")
    at = f"--precision bf16 --batch-frames {args.batch_frames} --accumulate {args.accumulate}"
    print(f"{'model':8} {'how':12} {'workers':>7} {'GB each':>8}  fits on, at {at}")
    for name, config in configs.items():
        kept = measure(config)
        for how in ("LoRA", "full, ddp", "full, fsdp2"):
            for workers in args.workers if how == "full, fsdp2" else args.workers[:1]:
                needed = gigabytes(config, kept, how, workers, args.batch_frames / args.accumulate, args.lora_rank)
                print(f"{name:8} {how:12} {workers:>7} {needed:8.1f}  {smallest_gpu(needed)}")


if __name__ == "__main__":
    main()
