"""Each flaw is found where it is, said in words, and not found in clean speech."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

soxr = pytest.importorskip("soxr", reason="needs keepstep[voice]")

from audio import SAMPLE_RATE_HZ, load_audio  # noqa: E402
from quality import (  # noqa: E402
    Limits,
    Measures,
    Problem,
    clipped_share,
    combined,
    judge_audio,
    judge_text,
    measure,
    num_letters,
)
from segments import Span, frame_levels_db  # noqa: E402

Wav = npt.NDArray[np.float32]
GOOD = Measures(duration_s=5.0, level_dbfs=-23.0, snr_db=35.0, clipped_share=0.0, high_band_db=-8.0, air_band_db=-12.0)
CLEAN = ["lj/LJ001-0001", "lj/LJ001-0008", "kathleen/arctic_a0001", "an4/an406-fcaw-b", "an4/an391-mjwl-b"]


def reasons(found: Measures, **limits: object) -> list[str]:
    return [problem.reason for problem in judge_audio(found, Limits(**limits))]  # type: ignore[arg-type]


def measured(wav: Wav, pause_s: float = 1.0) -> Measures:
    """Of speech between two pauses, which are part of `wav` already."""
    spans = [Span(pause_s, len(wav) / SAMPLE_RATE_HZ - pause_s)]
    inside = wav[int(pause_s * SAMPLE_RATE_HZ) : -int(pause_s * SAMPLE_RATE_HZ)]
    return measure(inside, pause_s, spans, frame_levels_db(wav))


def between_pauses(wav: Wav, noise_dbfs: float = -75.0) -> Wav:
    padded = np.pad(wav, SAMPLE_RATE_HZ)
    noise = np.random.default_rng(0).normal(0, 10 ** (noise_dbfs / 20), len(padded))
    return (padded + noise).astype(np.float32)


def through(wav: Wav, rate_hz: int) -> Wav:
    """As a recording of `rate_hz` would sound."""
    return np.asarray(soxr.resample(soxr.resample(wav, SAMPLE_RATE_HZ, rate_hz), rate_hz, SAMPLE_RATE_HZ), np.float32)


# ---- measures of real speech


@pytest.mark.parametrize("name", CLEAN)
def test_clean_speech_of_all_kinds_has_no_flaw(speech: Path, name: str) -> None:
    found = measured(between_pauses(load_audio(speech / f"{name}.flac")))
    assert judge_audio(found, Limits()) == []


@pytest.mark.parametrize("snr_db", [5, 10, 20, 30])
def test_noise_is_measured(speech: Path, snr_db: int) -> None:
    wav = load_audio(speech / "lj" / "LJ001-0001.flac")
    level_dbfs = 10 * np.log10(np.mean(wav.astype(np.float64) ** 2))
    found = measured(between_pauses(wav, level_dbfs - snr_db))
    assert found.snr_db == pytest.approx(snr_db, abs=1.0)
    assert ("noisy" in reasons(found)) == (snr_db < 15)


def test_without_pauses_the_softest_moments_tell_the_noise(speech: Path) -> None:
    wav = load_audio(speech / "lj" / "LJ001-0001.flac")
    level_dbfs = 10 * np.log10(np.mean(wav.astype(np.float64) ** 2))
    noise = np.random.default_rng(0).normal(0, 10 ** ((level_dbfs - 10) / 20), len(wav)).astype(np.float32)
    spans = [Span(0.0, len(wav) / SAMPLE_RATE_HZ)]
    assert measure(wav + noise, 0.0, spans, frame_levels_db(wav + noise)).snr_db == pytest.approx(10, abs=2)
    assert measure(wav, 0.0, spans, frame_levels_db(wav)).snr_db > 30


def test_the_room_is_measured_where_the_segment_is() -> None:
    draw = np.random.default_rng(0)
    quiet, loud = (draw.normal(0, level, 60 * SAMPLE_RATE_HZ).astype(np.float32) for level in (1e-4, 1e-2))
    wav = np.concatenate([quiet, loud])
    spans = [Span(5, 10), Span(110, 115)]
    for span in spans:
        wav[int(span.start_s * SAMPLE_RATE_HZ) : int(span.end_s * SAMPLE_RATE_HZ)] += 0.1
    levels = frame_levels_db(wav)
    pieces = [wav[int(span.start_s * SAMPLE_RATE_HZ) : int(span.end_s * SAMPLE_RATE_HZ)] for span in spans]
    snr = [measure(piece, span.start_s, spans, levels).snr_db for piece, span in zip(pieces, spans, strict=True)]
    assert snr == pytest.approx([60, 20], abs=1)


@pytest.mark.parametrize("gain", [2, 4, 8, 16])
@pytest.mark.parametrize("rate_hz", [24_000, 44_100])
def test_clipping_is_found_at_any_level_and_after_resampling(speech: Path, gain: float, rate_hz: int) -> None:
    wav = np.asarray(soxr.resample(load_audio(speech / "kathleen" / "arctic_a0002.flac"), SAMPLE_RATE_HZ, rate_hz))
    ceiling = np.abs(wav).max()
    clipped = 0.3 * np.clip(gain * wav, -ceiling, ceiling)
    found = clipped_share(np.asarray(soxr.resample(clipped, rate_hz, SAMPLE_RATE_HZ), np.float32))
    assert found > 0.005
    assert reasons(replace(GOOD, clipped_share=found)) == ["clipped"]
    assert clipped_share(load_audio(speech / "kathleen" / "arctic_a0002.flac")) < 0.001


@pytest.mark.parametrize("name", CLEAN)
def test_telephone_speech_is_found_and_wide_band_is_not(speech: Path, name: str) -> None:
    wav = load_audio(speech / f"{name}.flac")
    assert "narrow-band" in reasons(measured(between_pauses(through(wav, 8_000))))
    assert "narrow-band" not in reasons(measured(between_pauses(through(wav, 8_000))), allow_narrow_band=True)
    wide = measured(between_pauses(through(wav, 16_000), -100))
    assert "narrow-band" not in reasons(wide)
    assert wide.air_band_db < -40 or name.startswith("an4")


def test_silence_has_measures_too() -> None:
    found = measure(np.zeros(2400, np.float32), 0.0, [], np.full(10, -120.0, np.float32))
    assert reasons(found)[:2] == ["too-short", "too-quiet"]
    assert clipped_share(np.zeros(10, np.float32)) == 0.0


# ---- judgements


@pytest.mark.parametrize(
    ("change", "reason", "detail"),
    [
        ({"duration_s": 0.8}, "too-short", "0.80 s, 1 s are needed"),
        ({"duration_s": 21.0}, "too-long", "21.0 s without a place to cut, 15 s are allowed"),
        ({"level_dbfs": -57.0}, "too-quiet", "speech at -57 dBFS, at least -50"),
        ({"snr_db": 6.0}, "noisy", "6 dB above the background, at least 15"),
        ({"clipped_share": 0.031}, "clipped", "3.1% of the samples"),
        ({"high_band_db": -90.0}, "narrow-band", "nothing above 4 kHz .*--allow-narrow-band"),
    ],
)
def test_each_flaw_is_said_in_words(change: dict[str, float], reason: str, detail: str) -> None:
    assert reasons(GOOD) == []
    (problem,) = judge_audio(replace(GOOD, **change), Limits())
    assert problem.reason == reason
    import re

    assert re.search(detail, problem.detail), problem.detail


def test_limits_are_the_users() -> None:
    assert reasons(replace(GOOD, snr_db=16.0), min_snr_db=25.0) == ["noisy"]
    assert reasons(replace(GOOD, snr_db=6.0), min_snr_db=5.0) == []


@pytest.mark.parametrize(
    ("text", "speech_s", "reason"),
    [
        ("Printing, in the only sense with which we are at present concerned.", 4.0, None),
        ("G M Y S", 2.5, None),  # spelled
        ("我们明天去北京。", 2.0, None),
        ("In 1465 and 1469.", 3.0, None),
        ("Hello.", 9.0, "implausible-pace"),
        ("This is by far more text than anybody could ever say in a single second.", 1.0, "implausible-pace"),
        ("", 3.0, "no-words"),
        ("...", 3.0, "no-words"),
    ],
)
def test_the_pace_tells_a_wrong_text(text: str, speech_s: float, reason: str | None) -> None:
    assert [problem.reason for problem in judge_text(text, speech_s, Limits())] == ([reason] if reason else [])


def test_a_text_is_held_against_what_was_heard() -> None:
    (problem,) = judge_text("Good morning to you.", 1.5, Limits(), cer=0.8, heard="I sold the car")
    assert problem.reason == "transcript-mismatch" and "80%" in problem.detail and "I sold the car" in problem.detail
    assert judge_text("Good morning to you.", 1.5, Limits(), cer=0.1, heard="Good mourning to you") == []
    assert judge_text("Good morning to you.", 1.5, Limits(max_cer=0.05), cer=0.1, heard="x")
    (problem,) = judge_text("Good morning to you.", 1.5, Limits(), confidence=0.2)
    assert problem.reason == "unsure-transcript"


def test_letters_are_counted_as_they_are_spoken() -> None:
    assert num_letters("In 45, yes!") == len("infortyfiveyes")
    assert num_letters("北京") == 6


def test_all_problems_are_told_the_first_counts() -> None:
    assert combined([]) is None
    assert combined([Problem("noisy", "a"), Problem("clipped", "b")]) == Problem("noisy", "a; b")
