"""What fits on which GPU: counted and scaled up as it would be measured."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import fits
import pytest
from layout import Vocabulary


def test_sizes_are_those_in_the_names() -> None:
    assert 1.6e9 < fits.num_parameters(fits.named_config("1.7B")) < 2.0e9
    assert 0.6e9 < fits.num_parameters(fits.named_config("0.6B")) < 1.0e9


@pytest.mark.parametrize("size", fits.SIZES)
def test_named_models_have_a_place_for_every_id(size: str) -> None:
    """benchmarks/voice_memory.py trains them as they are."""
    config = fits.named_config(size)
    ids = asdict(Vocabulary.of(config))
    talker = config.talker_config
    text = {ids.pop(name) for name in ("tts_pad", "tts_bos", "tts_eos")}
    assert len(text) == 3 and max(text) < talker.text_vocab_size
    ids.pop("languages")
    codec = set(ids.values())
    assert len(codec) == len(ids)
    assert talker.code_predictor_config.vocab_size <= min(codec) and max(codec) < talker.vocab_size


def test_more_layers_keep_what_was_foretold_of_them(tiny_model: Path) -> None:
    config = fits.read_config(str(tiny_model))
    foretold = fits.measure(config).a_frame(layers=5, sub_layers=3)
    assert foretold == pytest.approx(fits._kept_bytes(config, 5, 3) / fits.TRIED_FRAMES, rel=0.01)


def test_shards_parts_and_additions_take_less(tiny_model: Path) -> None:
    config = fits.read_config(str(tiny_model))
    kept = fits.measure(config)
    full = fits.gigabytes(config, kept, "full, ddp", 1, 2000, 16)
    assert fits.gigabytes(config, kept, "full, fsdp2", 2, 2000, 16) == pytest.approx(full / 2)
    assert fits.gigabytes(config, kept, "full, ddp", 1, 1000, 16) < full
    assert fits.gigabytes(config, kept, "LoRA", 1, 2000, 1) < full


def test_the_table_names_the_smallest_gpu(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    named = [fits.smallest_gpu(size) for size in (10, 20, 36, 60, 120, 200)]
    assert named == ["T4", "L4, 4090", "A100-40", "A100-80, H100", "H200", "more workers, or LoRA"]
    fits.main(["--model-path", str(tiny_model), "--workers", "1", "2"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5 and all("T4" in line for line in lines[1:])
    with pytest.raises(SystemExit, match=r"fits.py: .* is not there"):
        fits.main(["--model-path", "./nowhere"])
