"""The demonstration's parts: a codec that the recipe loads like the real one, and a plan of who says what."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from qwen import load_codec
from voice.conftest import RECIPE

sys.path.insert(0, str(RECIPE / "demonstration"))
from mel_codec import MelCodecConfig, MelCodecModel, mel_spectrogram, save_codec, train_codec
from voices import all_voices, plan


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("codec")
    save_codec(MelCodecModel(MelCodecConfig(codebook_size=32, width=16, latent=8)).eval(), path)
    return path


def test_it_is_loaded_as_the_real_codec_is(folder: Path) -> None:
    codec = load_codec(str(folder))
    assert (codec.num_codebooks, codec.codebook_size, codec.sample_rate_hz) == (16, 32, 22_050)
    drawn = np.random.default_rng(0)
    wavs = [drawn.normal(0, 0.1, length).astype(np.float32) for length in (30_000, 9_000, 52_345)]
    together = codec.encode(wavs)
    assert [len(codes) for codes in together] == [-(-len(wav) // codec.samples_per_frame) for wav in wavs]
    for wav, codes in zip(wavs, together, strict=True):
        assert (codec.encode([wav])[0] == codes).all()
        assert len(np.unique(codes)) > 8


def test_it_learns_to_give_back_what_it_was_given() -> None:
    torch.manual_seed(0)
    time = torch.arange(44_100) / 22_050
    mels = [mel_spectrogram(0.3 * torch.sin(2 * torch.pi * hertz * time * (1 + time))) for hertz in (150, 300, 700)]

    def error(codec: MelCodecModel) -> float:
        with torch.no_grad():
            made = [codec.decode_mel(codes) for codes in codec.encode_mels(mels)]
        return float(np.mean([(m[:, : mel.shape[1]] - mel).abs().mean() for m, mel in zip(made, mels, strict=True)]))

    before, after = (error(train_codec(mels, steps, "cpu", 8, 8, codebook_size=16)) for steps in (1, 120))
    assert after < 0.5 * before


def test_who_says_what_is_as_planned() -> None:
    texts = [f"Sentence {number}." for number in range(50)]
    said = list(plan(texts, 2000))
    counts = Counter(voice.speaker for voice, _ in said)
    assert len(counts) == len(all_voices()) > 30
    assert counts["heart"] > counts["slt"] > counts["kal16"] > 0
    lengths = Counter(text.count(".") for _, text in said)
    assert lengths[1] > lengths[2] > lengths[3] > 0
    assert said == list(plan(texts, 2000))
