"""Finds speech with silero-vad and cuts it at pauses into segments of 1-15 s that keep the words said in them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import soxr
from audio import SAMPLE_RATE_HZ, Wav

MIN_SEGMENT_S = 1.0
MAX_SEGMENT_S = 15.0
PAD_S = 0.15
"""Kept on either side of the speech: the detector is late for soft beginnings and early for fading ends."""
MAX_SPEECH_S = MAX_SEGMENT_S - 2 * PAD_S
FADE_S = 0.005
"""At both ends, so that a cut in room noise makes no click."""
FRAME_S = 0.01
"""Levels are taken at this pace."""
FRAME_SIZE = round(FRAME_S * SAMPLE_RATE_HZ)

VAD_RATE_HZ = 16_000
VAD_LEAD_S = 0.5
"""Silence put before and after: at the very start of a file the detector otherwise misses up to 0.2 s of speech."""
STRETCH_S = 60.0
"""Audio is looked at in stretches of about this length, cut in a pause, so that an hour takes no more memory."""
MAX_PHRASE_S = 28.0
"""What the recogniser hears at once. Whisper's window is 30 s, and whole phrases give it context."""

# What a cut costs, for `plan`: the numbers only order the alternatives.
EACH_SEGMENT = 1.0
"""Fewer and longer segments are better: a cut must be worth it."""
NOT_A_SENTENCE = 0.5
"""The words before the cut end no sentence."""
NO_PAUSE = 3.0
"""The cut is between two words without silence."""
SHORT_PAUSE_S = 0.3
SHORT_PAUSE = 0.5
LONG_PAUSE_S = 0.7
PER_LONG_SECOND = 4.0
"""Silence beyond LONG_PAUSE_S inside a segment: a model trained on it learns to stall."""
PER_UNHEARD_SECOND = 10.0
"""Speech in which no word was recognised: noise, a laugh, or words that the text would lack."""
UNHEARD_S = 0.3
"""From this length on: less is a breath, or a word's own split."""
WILL_BE_REJECTED = 20.0
TORN_S = 0.1
"""A word with more than this on both sides of a pause is torn by a cut there, as far as its times can be trusted."""
SENTENCE_ENDS = (".", "!", "?", "…", "。", "！", "？", ":", ";")  # noqa: RUF001


@dataclass(frozen=True)
class Span:
    """From `start_s` to `end_s` in the source."""

    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True)
class Word:
    """A word as it is written, with the space before it, and when it is said."""

    text: str
    start_s: float
    end_s: float
    probability: float = 1.0
    is_timed: bool = True
    """False if the times are a guess, between those of its neighbours: no cut is made beside it."""


@dataclass(frozen=True)
class Segment(Span):
    """A piece to cut: what is heard from `start_s` to `end_s` is what `words` say."""

    words: tuple[Word, ...]
    is_doubtful: bool = False
    """Speech without words is in it or beside it: some words may have been timed into a neighbour."""

    @property
    def text(self) -> str:
        return "".join(word.text for word in self.words).strip()


# ---- where speech is


class SpeechDetector:
    """silero-vad, loaded once."""

    def __init__(self) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # it loads itself in ways that Python and torch want to give up
                import silero_vad

                self._model: Any = silero_vad.load_silero_vad()
        except ImportError as error:
            raise ValueError(f"silero-vad can't be imported ({error}): pip install 'keepstep[voice]'") from error
        self._timestamps = silero_vad.get_speech_timestamps

    def __call__(self, wav: Wav) -> list[Span]:
        """Where there is speech in `wav`, of SAMPLE_RATE_HZ."""
        import torch

        lead = np.zeros(int(VAD_LEAD_S * VAD_RATE_HZ), np.float32)
        heard = np.concatenate([lead, soxr.resample(wav, SAMPLE_RATE_HZ, VAD_RATE_HZ), lead])
        found = self._timestamps(torch.from_numpy(heard), self._model, sampling_rate=VAD_RATE_HZ)
        length_s = len(wav) / SAMPLE_RATE_HZ
        spans = []
        for item in found:
            start_s = max(0.0, item["start"] / VAD_RATE_HZ - VAD_LEAD_S)
            end_s = min(length_s, item["end"] / VAD_RATE_HZ - VAD_LEAD_S)
            if end_s > start_s:
                spans.append(Span(start_s, end_s))
        return spans


def frame_levels_db(wav: Wav) -> npt.NDArray[np.float32]:
    """The level of each FRAME_S in dB of full scale; digital silence is -120."""
    frames = wav[: len(wav) // FRAME_SIZE * FRAME_SIZE].reshape(-1, FRAME_SIZE).astype(np.float64)
    return np.asarray(10 * np.log10((frames**2).mean(1) + 1e-12), np.float32)


@dataclass(frozen=True)
class Stretch:
    start_s: float
    """In the source."""
    wav: Wav
    spans: list[Span]
    """Of speech, in the source's time."""


def stretches(blocks: Iterable[Wav], detect: Callable[[Wav], list[Span]]) -> Iterator[Stretch]:
    """The source in pieces of about STRETCH_S, each cut in the longest pause of its second half."""
    size = int(STRETCH_S * SAMPLE_RATE_HZ)
    pending = np.zeros(0, np.float32)
    start = 0
    for block in blocks:
        pending = np.concatenate([pending, block])
        while len(pending) >= size:
            spans = detect(pending[:size])
            cut = int(_longest_pause_s(spans, STRETCH_S) / FRAME_S) * FRAME_SIZE  # whole frames: levels stay in time
            yield _stretch(start, pending[:cut], spans)
            pending, start = pending[cut:], start + cut
    if len(pending):
        yield _stretch(start, pending, detect(pending))


def _stretch(start: int, wav: Wav, spans: list[Span]) -> Stretch:
    start_s, end_s = start / SAMPLE_RATE_HZ, (start + len(wav)) / SAMPLE_RATE_HZ
    moved = (Span(start_s + span.start_s, min(start_s + span.end_s, end_s)) for span in spans)
    return Stretch(start_s, wav, [span for span in moved if span.start_s < end_s])


def _longest_pause_s(spans: Sequence[Span], length_s: float) -> float:
    """The middle of the longest pause in the second half, or `length_s` if somebody speaks all along."""
    half_s = length_s / 2
    starts = [max(half_s, edge_s) for edge_s in (0.0, *(span.end_s for span in spans))]
    ends = [*(span.start_s for span in spans), length_s]
    longest_s, start_s = max((end_s - start_s, start_s) for start_s, end_s in zip(starts, ends, strict=True))
    return start_s + longest_s / 2 if longest_s > 0 else length_s


def phrases(spans: Sequence[Span], max_s: float = MAX_PHRASE_S) -> list[Span]:
    """Spans joined for the recogniser: as many as fit into `max_s`, up to the longest pause of its second half."""
    joined = []
    first = 0
    while first < len(spans):
        fits = [k for k in range(first, min(first + 500, len(spans))) if spans[k].end_s - spans[first].start_s <= max_s]
        last = fits[-1] if fits else first
        if last + 1 < len(spans):
            late = [k for k in fits if spans[k].end_s - spans[first].start_s >= max_s / 2] or [last]
            last = max(late, key=lambda k: spans[k + 1].start_s - spans[k].end_s)
        before_s = spans[first - 1].end_s if first else 0.0
        after_s = spans[last + 1].start_s if last + 1 < len(spans) else spans[last].end_s + 2 * PAD_S
        start_s = spans[first].start_s - min(PAD_S, (spans[first].start_s - before_s) / 2)
        joined.append(Span(start_s, spans[last].end_s + min(PAD_S, (after_s - spans[last].end_s) / 2)))
        first = last + 1
    return joined


# ---- where to cut


def plan(
    spans: Sequence[Span],
    words: Sequence[Word],
    levels_db: npt.NDArray[np.float32],
    words_are_heard: bool = True,
) -> list[Segment]:
    """The best way to cut the speech of a source at its pauses, each segment with its words, in order.

    `levels_db` (every FRAME_S) says where it is quietest between two words, where speech without any pause is longer
    than a segment may be. Nothing is left out: what is too short or too long to use is a segment too. `words_are_heard`
    is False for a given text, which a segment can't be asked for again: no cut is made beside speech without words.
    """
    atoms = _atoms(spans, words, levels_db)
    if not atoms:
        return []
    holders = _holders(atoms, words)
    own = [tuple(w for w, k in zip(words, holders, strict=True) if k == index) for index in range(len(atoms))]
    unheard_s = [0.0 if said else atom.duration_s for atom, said in zip(atoms, own, strict=True)]
    is_unheard = [duration_s >= UNHEARD_S for duration_s in unheard_s]
    may_cut = [
        _may_cut(atoms, own, index) and (words_are_heard or not any(is_unheard[index : index + 2]))
        for index in range(len(atoms) - 1)
    ]
    cut_cost = [_cut_cost(atoms, own, index) for index in range(len(atoms) - 1)] + [0.0]
    segments = []
    for first, last in _cheapest(atoms, may_cut, cut_cost, unheard_s):
        before = atoms[first - 1].end_s if first else 0.0
        after = atoms[last + 1].start_s if last + 1 < len(atoms) else len(levels_db) * FRAME_S
        start_s = atoms[first].start_s - min(PAD_S, max(0.0, atoms[first].start_s - before) / (2 if first else 1))
        room_s = max(0.0, after - atoms[last].end_s) / (2 if last + 1 < len(atoms) else 1)
        said = tuple(word for index in range(first, last + 1) for word in own[index])
        is_doubtful = any(is_unheard[max(0, first - 1) : last + 2])
        segments.append(Segment(start_s, atoms[last].end_s + min(PAD_S, room_s), said, is_doubtful))
    return segments


def whole(spans: Sequence[Span], text: str, duration_s: float) -> Segment:
    """All speech of a short source as one segment, with the text that was given for it."""
    start_s, end_s = max(0.0, spans[0].start_s - PAD_S), min(duration_s, spans[-1].end_s + PAD_S)
    return Segment(start_s, end_s, (Word(text, start_s, end_s),))


def _atoms(spans: Sequence[Span], words: Sequence[Word], levels_db: npt.NDArray[np.float32]) -> list[Span]:
    """The spans, but those that are too long for a segment cut between all their words."""
    atoms = []
    for span in spans:
        start_s = span.start_s
        if span.duration_s > MAX_SPEECH_S:
            for word, after in pairwise(words):
                middle_s = (word.end_s + after.start_s) / 2
                if word.is_timed and after.is_timed and start_s < middle_s < span.end_s:
                    cut_s = _quietest_s(levels_db, middle_s)
                    if start_s < cut_s < span.end_s:
                        atoms.append(Span(start_s, cut_s))
                        start_s = cut_s
        atoms.append(Span(start_s, span.end_s))
    return atoms


def _quietest_s(levels_db: npt.NDArray[np.float32], around_s: float, reach_s: float = 0.06) -> float:
    first = max(0, round((around_s - reach_s) / FRAME_S))
    window = levels_db[first : round((around_s + reach_s) / FRAME_S)]
    return (first + int(window.argmin()) + 0.5) * FRAME_S if len(window) else around_s


def _holders(atoms: Sequence[Span], words: Sequence[Word]) -> list[int]:
    """For each word the atom in which most of it is said, never one before that of the word before it."""
    holders: list[int] = []
    for word in words:
        least = holders[-1] if holders else 0
        beyond = next((k for k in range(least, len(atoms)) if atoms[k].start_s > word.end_s), len(atoms) - 1)
        # Recognisers stretch words over pauses: what counts is the part that lies in speech, then the distance.
        near = range(least, beyond + 1)
        holders.append(max(near, key=lambda k: (_overlap_s(word, atoms[k]), -_distance_s(word, atoms[k]), -k)))
    return holders


def _overlap_s(word: Word, span: Span) -> float:
    return max(0.0, min(word.end_s, span.end_s) - max(word.start_s, span.start_s))


def _distance_s(word: Word, span: Span) -> float:
    middle_s = (word.start_s + word.end_s) / 2
    return max(span.start_s - middle_s, middle_s - span.end_s, 0.0)


def _may_cut(atoms: Sequence[Span], own: Sequence[tuple[Word, ...]], index: int) -> bool:
    """Whether the cut after atom `index` leaves every word whole, on the right side."""
    before, after = atoms[index], atoms[index + 1]
    beside = [*own[index][-1:], *own[index + 1][:1]]
    if not all(word.is_timed for word in beside):
        return False
    if after.start_s == before.end_s:  # between two words, where their own times made the atoms
        return True
    return not any(_overlap_s(word, before) > TORN_S and _overlap_s(word, after) > TORN_S for word in beside)


def _cut_cost(atoms: Sequence[Span], own: Sequence[tuple[Word, ...]], index: int) -> float:
    pause_s = atoms[index + 1].start_s - atoms[index].end_s
    cost = NO_PAUSE if pause_s == 0 else SHORT_PAUSE if pause_s < SHORT_PAUSE_S else 0.0
    said = own[index]
    return cost + (NOT_A_SENTENCE if said and not said[-1].text.rstrip("\"'”’ ").endswith(SENTENCE_ENDS) else 0.0)  # noqa: RUF001


def _cheapest(
    atoms: Sequence[Span], may_cut: Sequence[bool], cut_cost: Sequence[float], unheard_s: Sequence[float]
) -> list[tuple[int, int]]:
    """Groups of consecutive atoms (first, last) that cost least together: shortest path over the allowed cuts."""
    best = [0.0] + [np.inf] * len(atoms)
    come_from = [0] * (len(atoms) + 1)
    for last in range(len(atoms)):
        if last + 1 < len(atoms) and not may_cut[last]:
            continue
        stalled, wordless = 0.0, 0.0
        for first in range(last, -1, -1):
            if first < last:
                pause_s = atoms[first + 1].start_s - atoms[first].end_s
                stalled += PER_LONG_SECOND * max(0.0, pause_s - LONG_PAUSE_S)
            wordless += unheard_s[first]
            duration_s = atoms[last].end_s - atoms[first].start_s
            cost = best[first] + EACH_SEGMENT + cut_cost[last] + stalled
            if first == last and unheard_s[first]:
                pass  # alone, where it does no harm
            elif MIN_SEGMENT_S - 2 * PAD_S <= duration_s <= MAX_SPEECH_S:
                cost += PER_UNHEARD_SECOND * wordless
            else:
                cost += WILL_BE_REJECTED
            if cost < best[last + 1]:
                best[last + 1], come_from[last + 1] = cost, first
            # Once too long, going further back helps only while no cut is allowed in between.
            if duration_s > MAX_SPEECH_S and np.isfinite(best[last + 1]):
                break
    groups = []
    end = len(atoms)
    while end > 0:
        groups.append((come_from[end], end - 1))
        end = come_from[end]
    return groups[::-1]


# ---- cutting


def cut_all(blocks: Iterable[Wav], spans: Sequence[Span]) -> Iterator[Wav]:
    """The audio of each span, from another reading of the source; `spans` in order of their starts."""
    bounds = [(round(span.start_s * SAMPLE_RATE_HZ), round(span.end_s * SAMPLE_RATE_HZ)) for span in spans]
    pending, offset, done = np.zeros(0, np.float32), 0, 0
    for block in blocks:
        if done == len(spans):
            return
        pending = np.concatenate([pending, block])
        while done < len(spans) and bounds[done][1] <= offset + len(pending):
            yield _faded(pending[bounds[done][0] - offset : bounds[done][1] - offset])
            done += 1
        keep = bounds[done][0] if done < len(spans) else offset + len(pending)
        pending, offset = pending[max(0, keep - offset) :], max(offset, min(keep, offset + len(pending)))
    for first, last in bounds[done:]:  # at the end a rounded sample may be missing
        yield _faded(pending[first - offset : last - offset])


def _faded(wav: Wav) -> Wav:
    size = min(int(FADE_S * SAMPLE_RATE_HZ), len(wav) // 2)
    faded = wav.copy()
    if size:
        ramp = np.linspace(0.0, 1.0, size, endpoint=False, dtype=np.float32)
        faded[:size] *= ramp
        faded[-size:] *= ramp[::-1]
    return faded
