"""Judges segments: measures what can be measured once, and says in words what is wrong with which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from audio import SAMPLE_RATE_HZ, Wav
from segments import FRAME_S, MAX_SEGMENT_S, MIN_SEGMENT_S, Span
from spoken import spoken_form

MIN_LEVEL_DBFS = -50.0
"""Speech below it must be raised by some 30 dB, and with it the noise of microphone and converter."""
SILENT_DBFS = -65.0
"""A source that is nowhere louder is silence, whatever the detector of speech thinks."""
MIN_SNR_DB = 15.0
"""A voice learns its background. 15 dB is a quiet office; studio recordings have 30 and more."""
MAX_CLIPPED_SHARE = 0.005
"""Samples at the ceiling. Speech at full scale has a tenth of it; from here on distortion is heard."""
NEAR_PEAK = 0.95
"""What counts as the ceiling: resampling and lossy codecs round off what was cut flat."""
PILE_UP = 1.5
"""Samples at a ceiling, as a multiple of those somewhat below it: 0.8 at most in clean recordings, 3 when clipped."""
NARROW_BAND_DB = -40.0
"""Loud moments of 4.2-7.5 kHz against all sound. Wide-band speech has -30 to -2, telephone speech below -43."""
MIN_CHARS_PER_S, MAX_CHARS_PER_S = 1.5, 28.0
"""Reading aloud has some 15 letters a second; spelling and counting 3; more than 28 nobody says."""
LETTERS_A_CHARACTER = 3.0
"""A Chinese, Japanese or Korean character is a syllable or more, and counts as so many letters."""
MAX_CER = 0.35
"""Letters that differ between the given text and what was heard. Whisper's own errors are below 0.2 mostly."""
MIN_CONFIDENCE = 0.4
"""The recogniser's mean probability of the weakest three words in a row. Hard names have 0.55; what it makes up at the
end of a phrase, in noise or music, has less than 0.4."""
MIN_PAUSE_S = 0.3
"""So much silence is needed to take the level of the background from."""
NEAR_S = 20.0
"""Pauses up to so far from a segment tell its background: rooms and microphones change in long recordings."""
EDGE_S = 0.1
"""Breath and reverberation beside speech are not background."""

HIGH_BAND_HZ = (4_200.0, 7_500.0)
AIR_BAND_HZ = (8_300.0, 11_000.0)
_WINDOW = 1024


@dataclass(frozen=True)
class Limits:
    """What a segment must keep to."""

    min_snr_db: float = MIN_SNR_DB
    min_level_dbfs: float = MIN_LEVEL_DBFS
    max_cer: float = MAX_CER
    allow_narrow_band: bool = False


@dataclass(frozen=True)
class Measures:
    """A segment in figures; the judgement needs nothing else."""

    duration_s: float
    level_dbfs: float
    """Of the speech, before its loudness is changed."""
    snr_db: float
    clipped_share: float
    high_band_db: float
    """Loud moments of 4.2-7.5 kHz against all sound."""
    air_band_db: float
    """The same of 8.3-11 kHz, which sources of 16 kHz lack."""


@dataclass(frozen=True)
class Problem:
    """Why a segment is not used: a word to count by, and a sentence to read."""

    reason: str
    detail: str


# ---- measures


def measure(wav: Wav, start_s: float, spans: Sequence[Span], levels_db: npt.NDArray[np.float32]) -> Measures:
    """`wav` starts at `start_s` in its source, whose spans of speech and levels of every FRAME_S are given."""
    duration_s = len(wav) / SAMPLE_RATE_HZ
    is_speech = _is_speech(spans, len(levels_db), 0.0)
    first, last = round(start_s / FRAME_S), round((start_s + duration_s) / FRAME_S)
    inside = levels_db[first:last]
    spoken = inside[is_speech[first:last]]
    level_dbfs = _mean_db(spoken if len(spoken) else inside)
    noise_dbfs = noise_level(first, last, spans, levels_db)
    high_db, air_db = _band_levels(wav)
    return Measures(duration_s, level_dbfs, snr(level_dbfs, noise_dbfs), clipped_share(wav), high_db, air_db)


def noise_level(first: int, last: int, spans: Sequence[Span], levels_db: npt.NDArray[np.float32]) -> float:
    """The background of frames `first` to `last`: of the pauses around them, of all pauses, or of their own softest."""
    near = round(NEAR_S / FRAME_S)
    is_pause = ~_is_speech(spans, len(levels_db), EDGE_S)
    around = slice(max(0, first - near), last + near)
    for pauses in (levels_db[around][is_pause[around]], levels_db[is_pause]):
        if len(pauses) * FRAME_S >= MIN_PAUSE_S:
            # The median: a click or a cough in a pause is not its level.
            return float(np.median(pauses))
    return float(np.percentile(levels_db[first:last], 5)) if last > first else -120.0


def snr(level_dbfs: float, noise_dbfs: float) -> float:
    """Speech against background; the level of speech holds the background too, which is taken out."""
    power, noise = 10 ** (level_dbfs / 10), 10 ** (noise_dbfs / 10)
    return float(10 * np.log10(max(power - noise, 1e-3 * noise) / noise))


def clipped_share(wav: Wav) -> float:
    """The share of samples that a ceiling cut off, at whatever level it is; nearly none in natural speech."""
    height = np.abs(wav)
    peak = float(height.max(initial=0.0))
    if peak == 0.0:
        return 0.0
    at_peak = float((height >= NEAR_PEAK * peak).mean())
    # Heavy clipping rings when resampled, and the ceiling is then far below the peak. But it is still where samples
    # pile up, while in natural speech there are always fewer samples the higher one looks.
    top = float(np.percentile(height, 99.9)) or peak
    counts, edges = np.histogram(height, bins=48, range=(0.0, 1.2 * top))
    fullest = 20 + int(counts[20:].argmax())
    below = counts[fullest - 6 : fullest - 1].mean()
    is_pile = counts[fullest : fullest + 2].mean() > PILE_UP * max(below, 1.0)
    return max(at_peak, float((height >= edges[fullest]).mean())) if is_pile else at_peak


def _is_speech(spans: Sequence[Span], num_frames: int, edge_s: float) -> npt.NDArray[np.bool_]:
    is_speech = np.zeros(num_frames, bool)
    for span in spans:
        is_speech[max(0, round((span.start_s - edge_s) / FRAME_S)) : round((span.end_s + edge_s) / FRAME_S)] = True
    return is_speech


def _mean_db(levels_db: npt.NDArray[np.float32]) -> float:
    return float(10 * np.log10(np.mean(10 ** (levels_db.astype(np.float64) / 10)))) if len(levels_db) else -120.0


def _band_levels(wav: Wav) -> tuple[float, float]:
    """How loud the loudest 5% of moments of the two high bands are: fricatives, which any speech has."""
    if len(wav) < _WINDOW:
        return 0.0, 0.0
    frames = np.lib.stride_tricks.sliding_window_view(wav, _WINDOW)[:: _WINDOW // 2] * np.hanning(_WINDOW)
    power = np.abs(np.fft.rfft(frames, axis=1)) ** 2
    hz = np.fft.rfftfreq(_WINDOW, 1 / SAMPLE_RATE_HZ)
    all_sound = power.sum(1).mean() + 1e-20
    loud = [
        np.percentile(power[:, (hz >= low) & (hz < high)].sum(1), 95) / all_sound
        for low, high in (HIGH_BAND_HZ, AIR_BAND_HZ)
    ]
    return float(10 * np.log10(loud[0] + 1e-20)), float(10 * np.log10(loud[1] + 1e-20))


# ---- judgements


def judge_audio(found: Measures, limits: Limits) -> list[Problem]:
    """Everything that is wrong with how a segment sounds; nothing, if it can be used."""
    problems = []
    if found.duration_s < MIN_SEGMENT_S:
        problems.append(Problem("too-short", f"{found.duration_s:.2f} s, {MIN_SEGMENT_S:.0f} s are needed"))
    if found.duration_s > MAX_SEGMENT_S + 0.01:
        problems.append(
            Problem("too-long", f"{found.duration_s:.1f} s without a place to cut, {MAX_SEGMENT_S:.0f} s are allowed")
        )
    if found.level_dbfs < limits.min_level_dbfs:
        problems.append(
            Problem(
                "too-quiet", f"speech at {found.level_dbfs:.0f} dBFS, at least {limits.min_level_dbfs:.0f} are needed"
            )
        )
    if found.clipped_share > MAX_CLIPPED_SHARE:
        problems.append(
            Problem(
                "clipped",
                f"{found.clipped_share:.1%} of the samples are cut off at the peak, {MAX_CLIPPED_SHARE:.1%} may be",
            )
        )
    if found.snr_db < limits.min_snr_db:
        problems.append(
            Problem(
                "noisy",
                f"speech is {found.snr_db:.0f} dB above the background, at least {limits.min_snr_db:.0f} are needed",
            )
        )
    if found.high_band_db < NARROW_BAND_DB and not limits.allow_narrow_band:
        problems.append(
            Problem(
                "narrow-band",
                f"nothing above 4 kHz ({found.high_band_db:.0f} dB): a telephone or 8 kHz recording,"
                " which --allow-narrow-band lets in",
            )
        )
    return problems


def judge_text(
    text: str,
    speech_s: float,
    limits: Limits,
    cer: float | None = None,
    heard: str | None = None,
    confidence: float | None = None,
) -> list[Problem]:
    """Everything that is wrong with a segment's text; `heard` is what a recogniser made of it, if asked."""
    letters = num_letters(text)
    if not letters:
        return [
            Problem("no-words", f"no words to be said in {text!r}" if text else "speech, but no words were recognised")
        ]
    problems = []
    if cer is not None and cer > limits.max_cer:
        problems.append(
            Problem(
                "transcript-mismatch",
                f"{cer:.0%} of the letters differ from what was heard, {limits.max_cer:.0%} may (--max-cer): {heard!r}",
            )
        )
    if confidence is not None and confidence < MIN_CONFIDENCE:
        problems.append(
            Problem(
                "unsure-transcript",
                f"some words are only {confidence:.0%} sure to the recogniser, {MIN_CONFIDENCE:.0%} are needed",
            )
        )
    pace = letters / max(speech_s, 0.1)
    if not MIN_CHARS_PER_S <= pace <= MAX_CHARS_PER_S:
        which = "words are missing from the text" if pace < MIN_CHARS_PER_S else "the text says more than can be said"
        problems.append(
            Problem(
                "implausible-pace",
                f"{pace:.1f} letters a second, {MIN_CHARS_PER_S:g} to {MAX_CHARS_PER_S:.0f} are plausible: {which}",
            )
        )
    return problems


def num_letters(text: str) -> float:
    """Letters as they are spoken, numbers written out; characters that are syllables count as several."""
    letters = spoken_form(text).replace(" ", "")
    syllables = sum("\u3040" <= letter <= "\u9fff" or "\uac00" <= letter <= "\ud7a3" for letter in letters)
    return len(letters) + (LETTERS_A_CHARACTER - 1) * syllables


def combined(problems: Sequence[Problem]) -> Problem | None:
    """One reason to count by, the first, with all details; None if there is no problem."""
    if not problems:
        return None
    return Problem(problems[0].reason, "; ".join(problem.detail for problem in problems))
