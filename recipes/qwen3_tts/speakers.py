"""Finds segments of another speaker in what should be one speaker's recordings, by the embeddings of their voices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scores import Embedding, mean_voice

SAME_VOICE = 0.75
"""Least similarity to the voice of the set. Of 13 real speakers nobody's own segments of 1.5 s and more were below
0.78, and 97% of the others' were below 0.75; very similar voices pass."""
SAME_VOICE_SHORT = 0.65
"""For segments below SHORT_S, in which too little is said to be sure: the speakers' own went down to 0.67."""
SHORT_S = 1.5
MIN_SEGMENTS = 3
"""Of fewer nothing can be said about who is the speaker."""
MAX_COMPARED = 1000
"""To find the voice that most segments share, so many, evenly spread, are compared each with each."""
MIXED_SHARE = 0.2
"""From this share of foreign segments on it is no stray guest, but a set of several speakers."""


@dataclass(frozen=True)
class Voices:
    """A set of segments sorted by voice."""

    similarities: list[float | None]
    """Of each segment to the voice of the set; None if its voice could not be told."""
    others: list[int]
    """Segments that are not of that voice."""
    num_alike: int
    """Of the others, how many are of one second voice."""

    def warning(self, speaker: str) -> str | None:
        """What to tell about the set as a whole."""
        num_told = sum(similarity is not None for similarity in self.similarities)
        if not self.others:
            return None
        text = f"{speaker}: {len(self.others)} of {num_told} segments do not sound like the rest and are rejected"
        if self.num_alike >= MIN_SEGMENTS:
            text += f"; {self.num_alike} of them sound alike, so there is a second speaker"
        if len(self.others) >= MIXED_SHARE * num_told:
            text += ". The recordings hold several speakers: put each into a folder and say --speaker-from folder"
        return text


def sort_voices(embeddings: Sequence[Embedding | None], durations_s: Sequence[float]) -> Voices:
    """Finds the voice that most segments share, and which ones are not like it; the order does not matter."""
    known = [index for index, embedding in enumerate(embeddings) if embedding is not None]
    similarities: list[float | None] = [None] * len(embeddings)
    if len(known) < MIN_SEGMENTS:
        return Voices(similarities, [], 0)
    vectors = np.stack([np.asarray(embeddings[index], np.float32) for index in known])
    least = np.where(np.asarray(durations_s)[known] < SHORT_S, SAME_VOICE_SHORT, SAME_VOICE)
    similar = vectors @ _main_voice(vectors)
    for index, similarity in zip(known, similar, strict=True):
        similarities[index] = round(float(similarity), 3)
    foreign = similar < least
    num_alike = 0
    if foreign.sum() >= MIN_SEGMENTS:
        second = _main_voice(vectors[foreign])
        num_alike = int((vectors[foreign] @ second >= SAME_VOICE).sum())
        if num_alike >= MIN_SEGMENTS:  # known by now: what is nearer to it is theirs, also what is too short to be sure
            theirs = vectors @ second > similar
            num_alike += int((theirs & ~foreign).sum())
            foreign |= theirs
    return Voices(similarities, [index for index, is_other in zip(known, foreign, strict=True) if is_other], num_alike)


def _main_voice(vectors: npt.NDArray[np.float32]) -> Embedding:
    """The mean of the segment with the most segments like it, and of those."""
    compared = vectors[:: -(-len(vectors) // MAX_COMPARED)]
    similar = compared @ compared.T
    centre = compared[max(range(len(compared)), key=lambda k: ((similar[k] >= SAME_VOICE).sum(), similar[k].mean()))]
    for _ in range(3):  # settles: what joins or leaves moves the mean little
        alike = vectors[vectors @ centre >= SAME_VOICE]
        centre = mean_voice(list(alike)) if len(alike) else centre
    return centre
