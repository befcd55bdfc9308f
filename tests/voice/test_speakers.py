"""Another speaker's segments are found among one speaker's, by real voices."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("soxr", reason="needs keepstep[voice]")

from audio import load_audio
from scores import SCORER_RATE_HZ, Embedding, SpeakerEncoder, Unavailable
from speakers import sort_voices
from voice.recordings import recordings

Voice = tuple[Embedding, float]


@pytest.fixture(scope="module")
def voices(speech: Path) -> dict[str, list[Voice]]:
    """Of four speakers ten segments each: (embedding, duration)."""
    try:
        encoder = SpeakerEncoder()
    except Unavailable as error:
        pytest.skip(str(error))
    found: dict[str, list[Voice]] = {}
    for speaker in ("lj", "kathleen", "an4-mjwl", "an4-mdms2"):
        wavs = [load_audio(path, SCORER_RATE_HZ) for path, _ in recordings(speech, speaker)[:10]]
        found[speaker] = [(encoder.embed(wav), len(wav) / SCORER_RATE_HZ) for wav in wavs]
    return found


def others(mixed: list[Voice]) -> list[int]:
    return sort_voices([embedding for embedding, _ in mixed], [duration_s for _, duration_s in mixed]).others


@pytest.mark.parametrize("speaker", ["lj", "kathleen", "an4-mjwl", "an4-mdms2"])
def test_one_speaker_is_one(voices: dict[str, list[Voice]], speaker: str) -> None:
    assert others(voices[speaker]) == []


@pytest.mark.parametrize(("main", "guest"), [("lj", "kathleen"), ("kathleen", "lj"), ("lj", "an4-mjwl"),
                                             ("an4-mdms2", "kathleen")])  # fmt: skip
def test_a_guest_is_found(voices: dict[str, list[Voice]], main: str, guest: str) -> None:
    own, foreign = voices[main], voices[guest][:2]
    assert others(own[:4] + foreign + own[4:]) == [4, 5]


def test_the_order_does_not_matter(voices: dict[str, list[Voice]]) -> None:
    mixed = voices["lj"] + voices["kathleen"][:6]
    order = np.random.default_rng(0).permutation(len(mixed))
    found = others([mixed[k] for k in order])
    assert sorted(int(order[k]) for k in found) == others(mixed) == list(range(10, 16))


def test_a_second_speaker_is_told_of(voices: dict[str, list[Voice]]) -> None:
    mixed = voices["lj"] + voices["kathleen"][:6]
    sorted_voices = sort_voices([embedding for embedding, _ in mixed], [duration_s for _, duration_s in mixed])
    warning = sorted_voices.warning("anna") or ""
    assert "anna: 6 of 16 segments do not sound like the rest" in warning
    assert "6 of them sound alike, so there is a second speaker" in warning and "--speaker-from folder" in warning
    similarities = [similarity for similarity in sorted_voices.similarities if similarity is not None]
    assert min(similarities[:10]) > 0.75 > max(similarities[10:])


def test_a_set_of_one_voice_has_no_warning(voices: dict[str, list[Voice]]) -> None:
    own = voices["lj"]
    assert sort_voices([embedding for embedding, _ in own], [duration_s for _, duration_s in own]).warning("lj") is None


def test_of_two_segments_nothing_can_be_said(voices: dict[str, list[Voice]]) -> None:
    assert others(voices["lj"][:1] + voices["an4-mjwl"][:1]) == []


def test_segments_without_a_voice_are_left_alone(voices: dict[str, list[Voice]]) -> None:
    embeddings = [embedding for embedding, _ in voices["lj"]]
    found = sort_voices([None, *embeddings, None], [5.0] * 12)
    assert found.others == [] and found.similarities[0] is None and found.similarities[11] is None
    assert sort_voices([], []).others == []
