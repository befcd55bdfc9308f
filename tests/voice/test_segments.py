"""Speech is found, cut at pauses, and every segment keeps exactly the words that are said in it."""

from __future__ import annotations

import warnings
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("soxr", reason="needs keepstep[voice]")

from audio import SAMPLE_RATE_HZ, load_audio
from segments import (
    FRAME_SIZE,
    MAX_SEGMENT_S,
    PAD_S,
    Segment,
    Span,
    SpeechDetector,
    Word,
    cut_all,
    frame_levels_db,
    phrases,
    plan,
    stretches,
    whole,
)

LEVELS = np.full(100_000, -20.0, np.float32)


def words_in(start_s: float, end_s: float, text: str) -> list[Word]:
    """The words of `text`, evenly spread."""
    written = [f" {word}" for word in text.split()]
    step_s = (end_s - start_s) / len(written)
    return [Word(word, start_s + k * step_s, start_s + (k + 1) * step_s) for k, word in enumerate(written)]


def texts(segments: list[Segment]) -> list[str]:
    return [segment.text for segment in segments]


@pytest.fixture(scope="module")
def detector() -> SpeechDetector:
    pytest.importorskip("silero_vad", reason="needs keepstep[voice]")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return SpeechDetector()


# ---- where speech is


def test_speech_is_found_between_pauses_and_at_the_very_start(speech: Path, detector: SpeechDetector) -> None:
    first, second = (load_audio(speech / "lj" / f"LJ001-000{k}.flac") for k in (1, 2))
    gap = np.zeros(2 * SAMPLE_RATE_HZ, np.float32)
    spans = detector(np.concatenate([first, gap, second]))
    assert spans[0].start_s < 0.1
    inside = [span for span in spans if span.end_s > len(first) / SAMPLE_RATE_HZ + 0.2]
    assert inside[0].start_s == pytest.approx(len(first) / SAMPLE_RATE_HZ + 2, abs=0.15)
    assert spans[-1].end_s == pytest.approx((len(first) + len(gap) + len(second)) / SAMPLE_RATE_HZ, abs=0.2)


def test_silence_and_noise_are_no_speech(detector: SpeechDetector) -> None:
    noise = np.random.default_rng(0).normal(0, 0.05, 3 * SAMPLE_RATE_HZ).astype(np.float32)
    assert detector(np.zeros(3 * SAMPLE_RATE_HZ, np.float32)) == []
    assert detector(noise) == []
    assert detector(noise[:10]) == []


def test_an_hour_is_looked_at_in_stretches_that_end_in_pauses() -> None:
    # Speech is 0.5, everything else 0: 50 s of speech, 4 s pause, over and over.
    seconds = np.concatenate([np.r_[np.full(50, 0.5), np.zeros(4)] for _ in range(6)]).astype(np.float32)
    wav = seconds.repeat(SAMPLE_RATE_HZ)

    def detect(part: np.ndarray) -> list[Span]:
        edges = np.flatnonzero(np.diff(np.r_[0, part > 0, 0])) / SAMPLE_RATE_HZ
        return [Span(float(a), float(b)) for a, b in edges.reshape(-1, 2)]

    found = list(stretches((wav[k : k + 230_000] for k in range(0, len(wav), 230_000)), detect))
    assert np.array_equal(np.concatenate([stretch.wav for stretch in found]), wav)
    assert all(len(stretch.wav) % FRAME_SIZE == 0 for stretch in found[:-1])
    assert max(len(stretch.wav) for stretch in found) <= 60 * SAMPLE_RATE_HZ
    spans = [span for stretch in found for span in stretch.spans]
    assert spans == [Span(54.0 * k, 54.0 * k + 50) for k in range(6)]


def test_speech_without_end_is_cut_all_the_same() -> None:
    wav = np.ones(150 * SAMPLE_RATE_HZ, np.float32)
    found = list(stretches([wav], lambda part: [Span(0.0, len(part) / SAMPLE_RATE_HZ)]))
    assert [len(stretch.wav) // SAMPLE_RATE_HZ for stretch in found] == [60, 60, 30]
    assert [stretch.start_s for stretch in found] == [0.0, 60.0, 120.0]


def test_phrases_end_in_the_longest_late_pause_and_leave_nothing_out() -> None:
    spans = [Span(0, 5), Span(5.2, 10), Span(10.2, 16), Span(18, 24), Span(24.2, 27), Span(27.2, 33), Span(33.5, 70)]
    found = phrases(spans)
    assert [(round(p.start_s, 2), round(p.end_s, 2)) for p in found] == [(0, 16.15), (17.85, 33.15), (33.35, 70.15)]


# ---- where to cut


def test_long_speech_is_cut_at_its_pauses_and_the_words_go_along() -> None:
    spans = [Span(0.2, 6), Span(7, 13), Span(14, 20), Span(21, 27)]
    words = [w for span, text in zip(spans, ["a b c.", "d e f.", "g h i.", "j k l."], strict=True)
             for w in words_in(span.start_s, span.end_s, text)]  # fmt: skip
    segments = plan(spans, words, LEVELS)
    assert "".join(texts(segments)).replace(" ", "") == "abc.def.ghi.jkl."
    assert all(segment.duration_s <= MAX_SEGMENT_S for segment in segments)
    for segment in segments:
        assert all(segment.start_s <= word.start_s and word.end_s <= segment.end_s for word in segment.words)


def test_short_pauses_are_kept_inside_and_long_ones_are_not() -> None:
    spans = [Span(1, 3), Span(3.2, 5), Span(8, 10)]
    words = words_in(1, 3, "one two") + words_in(3.2, 5, "three four.") + words_in(8, 10, "five six.")
    assert texts(plan(spans, words, LEVELS)) == ["one two three four.", "five six."]


def test_the_end_of_a_sentence_is_the_better_place() -> None:
    spans = [Span(0, 5), Span(5.4, 10), Span(10.4, 15), Span(15.4, 20)]
    words = words_in(0, 5, "a b") + words_in(5.4, 10, "c d.") + words_in(10.4, 15, "e f") + words_in(15.4, 20, "g h.")
    assert texts(plan(spans, words, LEVELS)) == ["a b c d.", "e f g h."]


def test_speech_without_a_pause_is_cut_between_words_where_it_is_quietest() -> None:
    spans = [Span(0, 28)]
    words = words_in(0, 28, " ".join(f"w{k}" for k in range(56)))
    levels = LEVELS[:2800].copy()
    levels[1403] = -60.0  # a dip beside the boundary at 14.0 s
    segments = plan(spans, words, levels)
    assert " ".join(texts(segments)) == " ".join(f"w{k}" for k in range(56))
    assert len(segments) == 2 and all(segment.duration_s <= MAX_SEGMENT_S for segment in segments)
    assert segments[0].end_s == segments[1].start_s
    cut = plan(spans, words_in(0, 14, "a b c d") + words_in(14, 28, "e f g h"), levels)
    assert 14.035 in [round(segment.end_s, 3) for segment in cut]


def test_without_words_a_long_span_stays_whole_and_is_not_lost() -> None:
    segments = plan([Span(1, 40)], [], LEVELS)
    assert [(round(s.start_s, 2), round(s.end_s, 2), s.text) for s in segments] == [(0.85, 40.15, "")]


def test_a_word_that_lies_over_a_pause_is_not_torn() -> None:
    spans = [Span(0, 8), Span(8.2, 16)]
    words = [*words_in(0, 7.5, "a b c"), Word(" torn", 7.5, 8.9), *words_in(8.9, 16, "d e f")]
    (segment,) = plan(spans, words, LEVELS)
    assert segment.text == "a b c torn d e f"  # too long, but nothing is said that is not written


def test_a_word_stretched_over_a_pause_belongs_to_its_sound() -> None:
    spans = [Span(0, 8), Span(10, 18)]
    words = [*words_in(0, 8, "a b c."), Word(" Then", 8.0, 10.6), *words_in(10.6, 18, "d e f.")]
    assert texts(plan(spans, words, LEVELS)) == ["a b c.", "Then d e f."]


def test_no_cut_beside_a_word_whose_time_is_a_guess() -> None:
    spans = [Span(0, 5), Span(6, 11), Span(12, 17)]
    words = [*words_in(0, 4, "a b"), Word(" guess.", 4, 5, 0.0, is_timed=False), *words_in(6, 11, "c d."),
             *words_in(12, 17, "e f.")]  # fmt: skip
    assert texts(plan(spans, words, LEVELS)) == ["a b guess. c d.", "e f."]


def test_speech_without_words_is_set_apart_and_its_neighbours_are_in_doubt() -> None:
    spans = [Span(0, 5), Span(5.5, 7), Span(7.5, 12), Span(20, 25)]
    words = words_in(0, 5, "a b.") + words_in(7.5, 12, "c d.") + words_in(20, 25, "e f.")
    segments = plan(spans, words, LEVELS)
    assert texts(segments) == ["a b.", "", "c d.", "e f."]
    assert [segment.is_doubtful for segment in segments] == [True, True, True, False]


def test_a_given_text_is_not_cut_beside_speech_without_words() -> None:
    spans = [Span(0, 5), Span(5.5, 7), Span(7.5, 12), Span(20, 25)]
    words = words_in(0, 5, "a b.") + words_in(7.5, 12, "c d.") + words_in(20, 25, "e f.")
    assert texts(plan(spans, words, LEVELS, words_are_heard=False)) == ["a b. c d.", "e f."]


def test_a_lone_syllable_is_its_own_segment_and_not_lost() -> None:
    segments = plan([Span(0, 5), Span(20, 20.4), Span(40, 45)], [*words_in(0, 5, "a b."), Word(" Oh.", 20, 20.4),
                    *words_in(40, 45, "c d.")], LEVELS)  # fmt: skip
    assert texts(segments) == ["a b.", "Oh.", "c d."]


@pytest.mark.parametrize("seed", range(5))
def test_whatever_is_said_no_word_is_lost_moved_or_heard_twice(seed: int) -> None:
    draw = np.random.default_rng(seed)
    spans, words, now_s = [], [], 0.0
    for number in range(120):
        start_s = now_s + draw.choice([0.15, 0.3, 0.8, 3.0])
        now_s = start_s + draw.choice([0.4, 2.0, 6.0, 22.0], p=[0.2, 0.4, 0.35, 0.05])
        spans.append(Span(start_s, now_s))
        said = " ".join(f"{number}-{k}" for k in range(max(1, int(2 * (now_s - start_s)))))
        words += words_in(start_s, now_s, said + draw.choice(["", "."]))
    segments = plan(spans, words, np.full(int(now_s * 100) + 50, -20.0, np.float32))
    assert [word for segment in segments for word in segment.words] == words
    assert all(one.end_s <= other.start_s + 1e-9 for one, other in pairwise(segments))
    assert all(segment.duration_s <= MAX_SEGMENT_S + 1e-6 for segment in segments)
    for segment in segments:
        for word in segment.words:
            assert segment.start_s - 0.1 <= word.start_s and word.end_s <= segment.end_s + 0.1


def test_a_short_recording_is_trimmed_to_its_speech() -> None:
    segment = whole([Span(2, 4), Span(5, 6)], "What is said.", 9.0)
    assert (segment.start_s, segment.end_s, segment.text) == (2 - PAD_S, 6 + PAD_S, "What is said.")
    assert whole([Span(0.05, 1)], "x", 1.02).start_s == 0 and whole([Span(0.05, 1)], "x", 1.02).end_s == 1.02


# ---- cutting


@pytest.mark.parametrize("block_s", [0.3, 1.7, 100])
def test_segments_are_cut_from_blocks_of_any_size(block_s: float) -> None:
    wav = np.random.default_rng(0).normal(0, 0.1, 20 * SAMPLE_RATE_HZ).astype(np.float32)
    size = int(block_s * SAMPLE_RATE_HZ)
    spans = [Span(0.0, 1.0), Span(1.0, 2.5), Span(7.25, 12.5), Span(19.0, 20.0)]
    cut = list(cut_all((wav[k : k + size] for k in range(0, len(wav), size)), spans))
    assert len(cut) == len(spans)
    for span, piece in zip(spans, cut, strict=True):
        expected = wav[round(span.start_s * SAMPLE_RATE_HZ) : round(span.end_s * SAMPLE_RATE_HZ)]
        assert np.array_equal(piece[200:-200], expected[200:-200])
        assert piece[0] == 0 and abs(piece[-1]) < 1e-3


def test_levels_are_those_of_the_frames() -> None:
    wav = np.concatenate([np.full(FRAME_SIZE, 0.1), np.zeros(FRAME_SIZE), np.ones(7)]).astype(np.float32)
    assert frame_levels_db(wav).tolist() == pytest.approx([-20.0, -120.0], abs=0.01)
