"""Scores of real recordings: they must tell voices, words and noise apart."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("av", reason="needs keepstep[voice]")

from voice.recordings import recordings
from voice.whisper import whisper_base  # noqa: F401  a fixture


def load(path: Path) -> Any:
    from audio import load_audio
    from scores import SCORER_RATE_HZ

    return load_audio(path, SCORER_RATE_HZ)


# ---- how sure a mean is


def test_an_interval_holds_the_mean_and_narrows_with_more_recordings() -> None:
    from scores import summarise

    values = np.random.default_rng(1).normal(0.8, 0.1, 400)
    few, many = summarise(values[:10]), summarise(values)
    assert few is not None and many is not None
    assert few.low < few.mean < few.high
    assert many.high - many.low < (few.high - few.low) / 2
    assert many.low < 0.8 < many.high
    assert summarise(values) == many, "the resampling is not seeded"


def test_weighted_rates_are_the_rate_of_the_whole() -> None:
    from scores import summarise

    found = summarise([1.0, 0.0], weights=[1, 9])
    assert found is not None
    assert found.mean == pytest.approx(0.1)


def test_one_recording_has_no_interval_and_is_told_apart_from_nothing() -> None:
    from scores import Summary, summarise

    assert summarise([]) is None
    one = summarise([0.9])
    assert one == Summary(1, 0.9, None, None)
    assert one.overlaps(Summary(10, 0.1, 0.05, 0.15))
    assert not Summary(10, 0.9, 0.8, 1.0).overlaps(Summary(10, 0.1, 0.05, 0.15))
    assert Summary(10, 0.9, 0.8, 1.0).overlaps(Summary(10, 0.85, 0.7, 0.9))


# ---- whose voice it is


@pytest.fixture(scope="module")
def encoder() -> Any:
    from scores import SpeakerEncoder, Unavailable

    try:
        return SpeakerEncoder()
    except Unavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def speakers(speech: Path, encoder: Any) -> Any:
    from scores import Speakers

    names = ("lj", "kathleen", "an4-fcaw", "an4-mjwl")
    return Speakers(
        "lj", {who: {str(path): encoder.embed(load(path)) for path, _ in recordings(speech, who)[:6]} for who in names}
    )


def test_a_held_out_recording_is_closest_to_its_own_speaker(speech: Path, encoder: Any, speakers: Any) -> None:
    own = [speakers.place(encoder.embed(load(path))) for path, _ in recordings(speech, "lj")[30:34]]
    other = [speakers.place(encoder.embed(load(path))) for path, _ in recordings(speech, "kathleen")[30:34]]
    assert [place.rank for place in own] == [1] * 4
    assert all(place.rank > 1 and place.nearest == "kathleen" for place in other)
    assert min(place.similarity for place in own) > max(speakers.different_speakers())
    assert max(place.similarity for place in other) < min(speakers.same_speaker())


def test_a_recording_does_not_vouch_for_itself(speakers: Any) -> None:
    key, embedding = next(iter(speakers._recordings["lj"].items()))
    assert speakers.place(embedding, without=[key]).similarity < speakers.place(embedding).similarity
    assert len(speakers.same_speaker()) == 6
    assert len(speakers.different_speakers()) == 18


def test_a_lone_recording_has_no_band_and_can_not_be_placed_by_itself() -> None:
    from scores import Speakers, Unscorable

    alone = Speakers("anna", {"anna": {"a": np.eye(4, dtype=np.float32)[0]}})
    assert alone.same_speaker() == alone.different_speakers() == []
    with pytest.raises(Unscorable, match="only recording of anna"):
        alone.place(np.eye(4, dtype=np.float32)[0], without=["a"])
    with pytest.raises(ValueError, match="no recording of anna"):
        Speakers("anna", {"berta": {"b": np.eye(4, dtype=np.float32)[0]}})


def test_loudness_is_no_part_of_a_voice(speech: Path, encoder: Any) -> None:
    wav = load(recordings(speech, "lj")[0][0])
    as_it_is = encoder.embed(wav)
    for gain in (0.2, 0.005):
        assert as_it_is @ encoder.embed(gain * wav) > 0.995
    # Made louder, such a click passes full scale: in 16 bits it must not wrap around.
    clicked = 0.05 * wav
    clicked[len(wav) // 2] = 0.9
    assert as_it_is @ encoder.embed(clicked) > 0.9


@pytest.mark.parametrize(
    ("wav", "reason"),
    [(np.zeros(0), "empty"), (np.zeros(16_000), "silent"), (np.r_[0.5, np.zeros(16_000)], "0.5 s are needed")],
)
def test_what_is_no_speech_has_no_voice(encoder: Any, wav: Any, reason: str) -> None:
    from scores import Unscorable

    with pytest.raises(Unscorable, match=reason):
        encoder.embed(wav.astype(np.float32))


# ---- what was said


def test_the_words_that_were_said_are_heard(speech: Path, whisper_base: Path) -> None:  # noqa: F811
    from scores import Transcriber
    from spoken import compare

    transcriber = Transcriber(str(whisper_base), language="en")
    (path, text), (_, other_text) = recordings(speech, "lj")[3:5]
    heard = transcriber.transcribe(load(path))
    assert compare(text, heard).wer < 0.15
    assert compare(other_text, heard).wer > 0.7
    assert transcriber.transcribe(load(path)) == heard
    assert transcriber.transcribe(np.zeros(0, np.float32)) == ""


def test_a_folder_that_holds_no_model_is_named(tmp_path: Path) -> None:
    pytest.importorskip("faster_whisper")
    from scores import Transcriber, Unavailable

    with pytest.raises(Unavailable, match=r"no model\.bin"):
        Transcriber(str(tmp_path))


# ---- how clean it sounds


def test_noise_lowers_the_quality(speech: Path) -> None:
    pytest.importorskip("speechmos")
    from scores import Quality, Unscorable

    quality = Quality(num_threads=1)
    wav = load(recordings(speech, "lj")[0][0])
    noise = np.random.default_rng(0).normal(0.0, 0.02, len(wav)).astype(np.float32)
    clean, noisy = quality.score(wav), quality.score(wav + noise)
    assert clean["overall"] > noisy["overall"] + 0.3
    assert clean["background"] > noisy["background"] + 0.5
    with pytest.raises(Unscorable, match="empty"):
        quality.score(np.zeros(0, np.float32))


# ---- how long it takes


def test_durations_are_compared_with_the_real_one_or_with_the_pace() -> None:
    from scores import characters_per_second, duration_ratio

    pace = characters_per_second(["twelve chars", "four"], [1.0, 1.0])
    assert pace == 8.0
    assert duration_ratio(3.0, "sixteen letters.", 2.0, pace) == (1.5, "real")
    assert duration_ratio(3.0, "sixteen letters.", None, pace) == (1.5, "pace")
    assert duration_ratio(3.0, "sixteen letters.", None, None) is None
    assert characters_per_second([], []) is None


# ---- a package that is missing


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def hide(package: str) -> None:
        for name in [name for name in sys.modules if name.split(".")[0] == package]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, package, None)

    return hide


@pytest.mark.parametrize(
    ("package", "scorer"),
    [("resemblyzer", "SpeakerEncoder"), ("faster_whisper", "Transcriber"), ("speechmos", "Quality")],
)
def test_a_missing_package_is_named_with_the_cure(without: Any, package: str, scorer: str) -> None:
    import scores

    without(package)
    arguments = ("base",) if scorer == "Transcriber" else ()
    with pytest.raises(scores.Unavailable, match=rf"(?s){package.replace('_', '.')}.*pip install 'keepstep\[voice\]'"):
        getattr(scores, scorer)(*arguments)
