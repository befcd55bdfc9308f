"""Loads Qwen3-TTS models and their codec, from a folder or by hub id, and says in words what cannot be loaded."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash

if TYPE_CHECKING:
    from qwen_tts import Qwen3TTSModel

Wav = npt.NDArray[np.float32]
Codes = npt.NDArray[np.int64]

TRAINED_STREAMING = "trained_streaming"
"""In an exported voice's configuration: it was trained on text that comes in as it is spoken."""
TRAINED_LANGUAGE = "trained_language"
"""The same for the language that all texts were trained in, which may be auto: none was named to the model."""
TRAINED_FROM = "trained_from"
"""The same for the folder or hub id of the base model."""
BASE_MODELS = ("Qwen/Qwen3-TTS-12Hz-1.7B-Base", "Qwen/Qwen3-TTS-12Hz-0.6B-Base")
_OF_THE_25_HZ_CODEC_ONLY = ("sox", "torchaudio", "torchaudio.compliance", "torchaudio.compliance.kaldi")


def import_qwen_tts() -> ModuleType:
    """The qwen_tts package; torchaudio and sox, which it imports for a codec that no 12 Hz model has, may be absent."""
    absent = [name for name in _OF_THE_25_HZ_CODEC_ONLY if importlib.util.find_spec(name.split(".")[0]) is None]
    for name in absent:
        sys.modules[name] = _stand_in(name)
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # it prints that flash-attn is absent, for that codec too
            import qwen_tts
    except ImportError as error:
        raise ValueError(f"qwen-tts cannot be imported ({error}): pip install 'keepstep[voice]'") from error
    finally:
        # Others ask whether torchaudio is there, and must not be told so.
        for name in absent:
            del sys.modules[name]
    return qwen_tts


def _stand_in(name: str) -> ModuleType:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    module.__path__ = []
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)
    return module


def local_folder(path_or_id: str, what: str = "a Qwen3-TTS model") -> Path:
    """The folder of a model: itself, or where the hub's files are kept once they are downloaded."""
    folder = Path(path_or_id).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ValueError(f"{folder} has no config.json: name the folder of {what}, or a hub id as {BASE_MODELS[1]}")
        return folder
    if folder.is_absolute() or path_or_id.count("/") != 1 or path_or_id.startswith("."):
        raise ValueError(f"{path_or_id} is not there: name the folder of {what}, or a hub id as {BASE_MODELS[1]}")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path_or_id))
    except Exception as error:  # no network, no such model, no permission: the hub's own exceptions share no base
        raise ValueError(f"{path_or_id} is no folder here, and the hub did not give it: {error}") from error


def chosen_device(asked: str) -> str:
    """What `--device auto|cpu|cuda` means here."""
    if asked == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch finds no GPU here; give --device cpu, or auto")
    return ("cuda" if torch.cuda.is_available() else "cpu") if asked == "auto" else asked


def load_voice_model(
    path_or_id: str, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> Qwen3TTSModel:
    """A model that speaks: a base model clones, a fine-tuned one has voices of its own."""
    qwen_tts = import_qwen_tts()
    from transformers.utils import logging

    logging.set_verbosity_error()  # at each generation it would say what it takes for padding
    folder = local_folder(path_or_id)
    dtype = dtype or (torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32)
    model = qwen_tts.Qwen3TTSModel.from_pretrained(str(folder), dtype=dtype)
    model.model.to(device).eval()
    model.device = torch.device(device)
    codec = model.model.speech_tokenizer
    codec.model.to(device).eval()
    codec.device = torch.device(device)
    return model  # type: ignore[no-any-return]


def require_base(model: Qwen3TTSModel, path_or_id: str) -> None:
    kind = model.model.tts_model_type
    if kind != "base":
        raise ValueError(
            f"{path_or_id} is a {kind} model, which has no speaker encoder; cloning and fine-tuning need a base model, "
            f"as {' or '.join(BASE_MODELS)}"
        )


def wants_whole_text(model: Qwen3TTSModel) -> bool:
    """Whether a trained voice gets the text before it speaks, `non_streaming_mode`, as it did in training."""
    return not getattr(model.model.config, TRAINED_STREAMING, False)


def trained_language(model: Qwen3TTSModel) -> str | None:
    """What a trained voice is asked in, as it was in training; None for a model that this recipe did not make."""
    return getattr(model.model.config, TRAINED_LANGUAGE, None)


def check_language(model: Qwen3TTSModel, language: str) -> str:
    supported = model.get_supported_languages() or []
    if language.lower() not in supported:
        raise ValueError(f"language {language!r} is not one of the model's: {', '.join(supported)}")
    return language.lower()


class Codec:
    """Audio to codes and back; what a row's padding to the longest of its batch is does not change its codes."""

    def __init__(self, tokenizer: Any, identity: str) -> None:
        self._tokenizer = tokenizer
        self.identity = identity
        self.sample_rate_hz = int(tokenizer.get_input_sample_rate())
        self.samples_per_frame = int(tokenizer.get_encode_downsample_rate())
        self.frames_per_second = self.sample_rate_hz / self.samples_per_frame
        self.num_codebooks = int(tokenizer.model.encoder_valid_num_quantizers)
        self.codebook_size = int(tokenizer.model.config.decoder_config.codebook_size)

    def encode(self, wavs: list[Wav]) -> list[Codes]:
        # To whole frames: alone, the codec fills up the last one otherwise than the silence of a batch does.
        whole = [np.pad(wav, (0, -len(wav) % self.samples_per_frame)) for wav in wavs]
        encoded = self._tokenizer.encode(whole, sr=self.sample_rate_hz)
        return [codes.cpu().numpy().astype(np.int64) for codes in encoded.audio_codes]

    def decode(self, codes: list[Codes]) -> list[Wav]:
        wavs, _ = self._tokenizer.decode([{"audio_codes": torch.as_tensor(one)} for one in codes])
        return [wav.astype(np.float32) for wav in wavs]


def load_codec(path_or_id: str, device: torch.device | str = "cpu") -> Codec:
    """The codec of a TTS model's folder (its speech_tokenizer/), or one that stands alone."""
    qwen_tts = import_qwen_tts()
    folder = local_folder(path_or_id, "a Qwen3-TTS model or codec")
    if (folder / "speech_tokenizer" / "config.json").is_file():
        folder = folder / "speech_tokenizer"
    tokenizer = qwen_tts.Qwen3TTSTokenizer.from_pretrained(str(folder))
    if tokenizer.get_model_type() != "qwen3_tts_tokenizer_12hz":
        raise ValueError(f"{path_or_id} has a {tokenizer.get_model_type()} codec; the 12 Hz one is needed")
    tokenizer.model.to(device).eval()
    tokenizer.device = torch.device(device)
    return Codec(tokenizer, identity=identity(folder))


def identity(folder: Path) -> str:
    """Tells one model from another, whatever its folder is called: a hash of its weights."""
    digest = xxhash.xxh3_128()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            while block := file.read(1 << 22):
                digest.update(block)
    return digest.hexdigest()
