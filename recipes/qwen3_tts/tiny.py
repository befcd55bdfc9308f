"""Builds a tiny Qwen3-TTS base model with random weights, whole: for tests, and to try every stage without a download.

python tiny.py --output tiny-base
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from qwen import import_qwen_tts
from torch import nn

CODEBOOK_SIZE = 64
NUM_CODEBOOKS = 16
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>")
_SENTENCES = (
    "assistant\n user\n system\n The quick brown fox jumps over the lazy dog. She sells sea shells by the sea shore. "
    "Printing, in the only sense with which we are at present concerned, differs from most if not from all the arts. "
)


def build_tiny(folder: Path, seed: int = 0, hidden_size: int = 64, num_layers: int = 2) -> Path:
    """Writes a base model that `Qwen3TTSModel.from_pretrained` loads: talker, sub-talker, speaker encoder, codec."""
    from qwen_tts.core.models import Qwen3TTSConfig, Qwen3TTSForConditionalGeneration

    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    tokenizer = build_text_tokenizer(_SENTENCES)
    tokenizer.save_pretrained(folder)
    talker = talker_settings(len(tokenizer), CODEBOOK_SIZE, NUM_CODEBOOKS, hidden_size, num_layers)
    # Text, talker and sub-talker are of three widths in the 1.7 B model: so the layers between them are there, too.
    talker["text_hidden_size"] = 2 * hidden_size
    talker["code_predictor_config"] |= {"hidden_size": hidden_size // 2, "intermediate_size": hidden_size}
    config = Qwen3TTSConfig(
        talker_config=talker,
        speaker_encoder_config=speaker_encoder_settings(hidden_size, channels=32),
        tokenizer_type="qwen3_tts_tokenizer_12hz",
        tts_model_size="tiny",
        tts_model_type="base",
        **special_ids(tokenizer),
    )
    model = Qwen3TTSForConditionalGeneration(config)
    save_model(model, folder)
    save_codec(build_codec(seed), folder / "speech_tokenizer")
    return folder


def build_text_tokenizer(text: str, vocab_size: int = 400) -> Any:
    """A byte-level BPE in which `assistant` is one token, as prompts are sliced by token."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import Qwen2TokenizerFast

    bpe = ByteLevelBPETokenizer()
    # Merged first, however long the text is: no pair of letters is every tenth.
    often = max(500, len(text) // 10)
    bpe.train_from_iterator([text, *["assistant"] * often], vocab_size=vocab_size, min_frequency=2, show_progress=False)
    made = Qwen2TokenizerFast(
        tokenizer_object=bpe._tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", unk_token="<|endoftext|>"
    )
    made.add_special_tokens({"additional_special_tokens": list(SPECIAL_TOKENS)})
    assert len(made("<|im_start|>assistant\n").input_ids) == 3
    return made


def special_ids(tokenizer: Any) -> dict[str, int]:
    names = ("im_start", "im_end", "tts_pad", "tts_bos", "tts_eos")
    return {
        f"{name}_token_id": tokenizer.convert_tokens_to_ids(token)
        for name, token in zip(names, SPECIAL_TOKENS[1:], strict=True)
    }


def talker_settings(
    text_vocab_size: int, codebook_size: int, num_codebooks: int, hidden_size: int, num_layers: int
) -> dict[str, Any]:
    """A talker of any size, with Qwen3-TTS's own places for what is not a code: the 1,024 ids above the codebook."""
    head_dim, num_heads = 16 if hidden_size < 256 else 64, max(1, hidden_size // (16 if hidden_size < 256 else 64))
    first = codebook_size
    shared = {
        "hidden_size": hidden_size,
        "intermediate_size": 3 * hidden_size,
        "num_attention_heads": num_heads,
        "num_key_value_heads": max(1, num_heads // 2),
        "head_dim": head_dim,
        "num_code_groups": num_codebooks,
    }
    half = head_dim // 2
    sections = [half - 2 * (half // 3), half // 3, half // 3]
    return shared | {
        "num_hidden_layers": num_layers,
        "vocab_size": codebook_size + 1024,
        "text_vocab_size": text_vocab_size,
        "text_hidden_size": hidden_size,
        "rope_scaling": {"rope_type": "default", "mrope_section": sections, "interleaved": True},
        "codec_pad_id": first + 100,
        "codec_bos_id": first + 101,
        "codec_eos_token_id": first + 102,
        "codec_think_id": first + 106,
        "codec_nothink_id": first + 107,
        "codec_think_bos_id": first + 108,
        "codec_think_eos_id": first + 109,
        "codec_language_id": {"english": first + 2, "chinese": first + 7, "german": first + 5},
        "spk_id": {},
        "spk_is_dialect": {},
        "pad_token_id": None,
        "code_predictor_config": shared | {"num_hidden_layers": max(1, num_layers // 2), "vocab_size": codebook_size},
    }


def speaker_encoder_settings(hidden_size: int, channels: int) -> dict[str, Any]:
    return {
        "enc_dim": hidden_size,
        "enc_channels": [channels] * 4 + [3 * channels],
        "enc_attention_channels": channels,
        "enc_se_channels": channels,
        "enc_res2net_scale": 8,
    }


def build_codec(seed: int) -> nn.Module:
    """A codec of Qwen3-TTS's kind; its fresh weights would give one code for all audio, and silence for all codes."""
    from qwen_tts.core import Qwen3TTSTokenizerV2Config, Qwen3TTSTokenizerV2Model

    torch.manual_seed(seed)
    encoder = {
        "hidden_size": 32,
        "num_filters": 4,
        "num_residual_layers": 1,
        "codebook_size": CODEBOOK_SIZE,
        "codebook_dim": 16,
        "vector_quantization_hidden_dimension": 16,
        "num_quantizers": NUM_CODEBOOKS,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 64,
        "upsampling_ratios": [8, 6, 5, 4],
        "sampling_rate": 24_000,
        "upsample_groups": 32,
    }
    decoder = {
        "codebook_size": CODEBOOK_SIZE,
        "codebook_dim": 16,
        "hidden_size": 32,
        "latent_dim": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_quantizers": NUM_CODEBOOKS,
        "decoder_dim": 32,
    }
    codec = Qwen3TTSTokenizerV2Model(Qwen3TTSTokenizerV2Config(encoder_config=encoder, decoder_config=decoder))
    with torch.no_grad():
        for name, values in [*codec.named_parameters(), *codec.named_buffers()]:
            if name.endswith(("embed_sum", "embedding_sum")):
                values.copy_(torch.randn(values.shape))
        for module in codec.modules():
            if isinstance(module, (nn.Conv1d, nn.ConvTranspose1d)):
                module.reset_parameters()
                module.weight *= 2
    return codec


def save_codec(codec: nn.Module, folder: Path) -> None:
    from transformers import EncodecFeatureExtractor

    codec.save_pretrained(folder)
    EncodecFeatureExtractor(feature_size=1, sampling_rate=24_000, padding_value=0.0).save_pretrained(folder)


def save_model(model: nn.Module, folder: Path) -> None:
    """`save_pretrained`, but for names in its configuration that its own constructor does not take back."""
    import inspect

    from qwen_tts.core.models.configuration_qwen3_tts import Qwen3TTSSpeakerEncoderConfig

    model.save_pretrained(folder)
    path = folder / "config.json"
    settings = json.loads(path.read_text())
    known = inspect.signature(Qwen3TTSSpeakerEncoderConfig.__init__).parameters
    encoder = settings["speaker_encoder_config"]
    settings["speaker_encoder_config"] = {name: value for name, value in encoder.items() if name in known}
    path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
    (folder / "generation_config.json").write_text(json.dumps({"max_new_tokens": 64}, indent=2) + "\n")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("tiny-base"), help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    import_qwen_tts()
    print(f"written: {build_tiny(args.output, args.seed)}")


if __name__ == "__main__":
    main()
