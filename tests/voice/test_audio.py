"""Any container is read as mono at the asked rate, what can't be read is named, and files say where they are from."""

from __future__ import annotations

import struct
from fractions import Fraction
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

av = pytest.importorskip("av", reason="needs keepstep[voice]")

from audio import (  # noqa: E402
    SAMPLE_RATE_HZ,
    AudioError,
    audio_info,
    load_audio,
    read_provenance,
    stream_audio,
    weights_of,
    write_wav,
)

Wav = npt.NDArray[np.float32]
CODECS = {
    "wav": "pcm_s16le",
    "flac": "flac",
    "mp3": "mp3",
    "m4a": "aac",
    "ogg": "libopus",
    "mp4": "aac",
    "mkv": "libopus",
    "webm": "libopus",
}


def tone(hz: float, rate_hz: int = SAMPLE_RATE_HZ, duration_s: float = 1.0) -> Wav:
    return (0.5 * np.sin(2 * np.pi * hz * np.arange(int(duration_s * rate_hz)) / rate_hz)).astype(np.float32)


def encode(path: Path, channels: Wav, rate_hz: int, codec: str, with_video: bool = False) -> Path:
    """`channels` [1 or 2, n] in the container that the suffix names."""
    layout = "mono" if len(channels) == 1 else "stereo"
    with av.open(str(path), "w") as container:
        video = container.add_stream("mpeg4", rate=5) if with_video else None
        stream = container.add_stream(codec, rate=rate_hz, layout=layout)
        if video is not None:
            video.width = video.height = 64
            for _ in range(5):
                frame = av.VideoFrame.from_ndarray(np.zeros((64, 64, 3), np.uint8), format="rgb24")
                container.mux(video.encode(frame))
            container.mux(video.encode(None))
        for start in range(0, channels.shape[1], 1024):
            frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(channels[:, start : start + 1024]), "fltp", layout)
            frame.sample_rate, frame.pts, frame.time_base = rate_hz, start, Fraction(1, rate_hz)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


def similarity(one: Wav, other: Wav) -> float:
    """The highest correlation over small shifts: codecs delay."""
    size = min(len(one), len(other)) - 4000
    shifts = range(0, 4000, 4)
    centre = one[2000 : 2000 + size]
    return max(float(np.corrcoef(centre, other[k : k + size])[0, 1]) for k in shifts)


@pytest.mark.parametrize("suffix", CODECS)
def test_every_container_gives_the_speech_that_is_in_it(speech: Path, tmp_path: Path, suffix: str) -> None:
    original = load_audio(speech / "lj" / "LJ001-0002.flac", 48_000)
    path = encode(tmp_path / f"a.{suffix}", original[None], 48_000, CODECS[suffix], with_video=suffix in ("mp4", "mkv"))
    wav, expected = load_audio(path), load_audio(speech / "lj" / "LJ001-0002.flac")
    assert wav.dtype == np.float32 and wav.ndim == 1
    assert abs(len(wav) - len(expected)) < 0.08 * SAMPLE_RATE_HZ
    assert similarity(expected, np.pad(wav, (0, 4000))) > 0.97


@pytest.mark.parametrize("rate_hz", [8_000, 16_000, 22_050, 44_100, 48_000])
def test_the_rate_is_changed_without_changing_what_is_heard(tmp_path: Path, rate_hz: int) -> None:
    wav = load_audio(encode(tmp_path / "a.flac", tone(1000, rate_hz, 2.0)[None], rate_hz, "flac"))
    assert abs(len(wav) - 2 * SAMPLE_RATE_HZ) <= 2
    middle = slice(SAMPLE_RATE_HZ // 2, SAMPLE_RATE_HZ * 3 // 2)
    assert np.abs(wav[middle] - tone(1000, duration_s=2.0)[middle]).max() < 1e-3


def test_what_the_lower_rate_cannot_hold_does_not_come_back_as_something_else(tmp_path: Path) -> None:
    wav = load_audio(encode(tmp_path / "a.flac", tone(13_000, 48_000)[None], 48_000, "flac"))
    assert np.abs(wav[4000:-4000]).max() < 1e-3


def test_blocks_are_the_file(speech: Path, tmp_path: Path) -> None:
    long = np.tile(load_audio(speech / "lj" / "LJ001-0001.flac"), 4)
    write_wav(tmp_path / "a.wav", long)
    blocks = list(stream_audio(tmp_path / "a.wav"))
    assert len(blocks) >= 3 and max(len(block) for block in blocks) < 12 * SAMPLE_RATE_HZ
    assert np.abs(np.concatenate(blocks) - long).max() < 1e-4


def test_stereo_is_mixed_down(tmp_path: Path) -> None:
    left, right = tone(500), tone(700)
    wav = load_audio(encode(tmp_path / "a.flac", np.stack([left, right]), SAMPLE_RATE_HZ, "flac"))
    assert np.abs(wav - (left + right) / 2).max() < 1e-3


@pytest.mark.parametrize("silent", [0, 1])
def test_a_silent_channel_does_not_halve_the_other(tmp_path: Path, silent: int) -> None:
    channels = np.stack([tone(500), tone(500)])
    channels[silent] = 1e-4 * np.random.default_rng(0).normal(size=channels.shape[1])
    wav = load_audio(encode(tmp_path / "a.flac", channels, SAMPLE_RATE_HZ, "flac"))
    assert np.abs(wav - tone(500)).max() < 2e-3


def test_channels_that_cancel_out_are_not_mixed(tmp_path: Path) -> None:
    wav = load_audio(encode(tmp_path / "a.flac", np.stack([tone(500), -tone(500)]), SAMPLE_RATE_HZ, "flac"))
    assert np.abs(np.abs(wav).max() - 0.5) < 0.01


def test_silence_has_weights_too() -> None:
    assert weights_of(np.zeros((2, 2))).tolist() == [0.5, 0.5]


def test_what_a_file_says_of_itself(tmp_path: Path) -> None:
    info = audio_info(encode(tmp_path / "a.m4a", np.stack([tone(500, 44_100)] * 2), 44_100, "aac"))
    assert (info.sample_rate_hz, info.num_channels, info.codec) == (44_100, 2, "aac")
    assert info.duration_s == pytest.approx(1.0, abs=0.1)


# ---- what can't be read


def test_what_is_no_file_or_empty_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.wav").touch()
    with pytest.raises(AudioError, match=r"a\.wav is empty: 0 bytes"):
        load_audio(tmp_path / "a.wav")
    with pytest.raises(AudioError, match=r"b\.wav is not a file"):
        load_audio(tmp_path / "b.wav")
    with pytest.raises(AudioError, match="is not a file"):
        load_audio(tmp_path)


@pytest.mark.parametrize("suffix", ["wav", "mp3", "m4a", "mkv"])
def test_what_is_no_audio_is_named(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.{suffix}"
    path.write_bytes(b"Dear reader, this is a letter. " * 200)
    with pytest.raises(AudioError, match=r"PyAV .* says .*damaged, or no audio or video file"):
        load_audio(path)


def test_a_film_without_sound_is_named(tmp_path: Path) -> None:
    with av.open(str(tmp_path / "a.mp4"), "w") as container:
        video = container.add_stream("mpeg4", rate=5)
        video.width = video.height = 64
        container.mux(video.encode(av.VideoFrame.from_ndarray(np.zeros((64, 64, 3), np.uint8), format="rgb24")))
        container.mux(video.encode(None))
    with pytest.raises(AudioError, match="no audio stream: it holds video only"):
        load_audio(tmp_path / "a.mp4")


def test_a_recording_without_samples_is_named(tmp_path: Path) -> None:
    write_wav(tmp_path / "a.wav", np.zeros(0, np.float32))
    with pytest.raises(AudioError, match=r"empty|can't be read"):
        load_audio(tmp_path / "a.wav")


def test_damage_in_the_middle_is_named_and_not_read_over(speech: Path, tmp_path: Path) -> None:
    content = bytearray((speech / "lj" / "LJ001-0001.flac").read_bytes())
    content[60_000:64_000] = np.random.default_rng(0).bytes(4_000)
    (tmp_path / "a.flac").write_bytes(content)
    with pytest.raises(AudioError, match=r"damaged at 2\.\d s"):
        load_audio(tmp_path / "a.flac")


def test_a_torn_end_is_read_up_to_there(speech: Path, tmp_path: Path) -> None:
    content = (speech / "lj" / "LJ001-0001.flac").read_bytes()
    (tmp_path / "a.flac").write_bytes(content[: len(content) // 2])
    wav = load_audio(tmp_path / "a.flac")
    expected = load_audio(speech / "lj" / "LJ001-0001.flac")
    assert 0.3 * len(expected) < len(wav) < 0.7 * len(expected)
    assert np.abs(wav[:-500] - expected[: len(wav) - 500]).max() < 1e-3


def test_numbers_that_are_none_are_named(tmp_path: Path) -> None:
    samples = np.full(2400, np.nan, "<f4").tobytes()
    header = b"WAVEfmt " + struct.pack("<IHHIIHH", 16, 3, 1, 24_000, 96_000, 4, 32)
    body = header + b"data" + struct.pack("<I", len(samples)) + samples
    (tmp_path / "a.wav").write_bytes(b"RIFF" + struct.pack("<I", len(body)) + body)
    with pytest.raises(AudioError, match="NaN"):
        load_audio(tmp_path / "a.wav")


# ---- writing


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    write_wav(tmp_path / "new" / "a.wav", tone(440))
    assert np.abs(load_audio(tmp_path / "new" / "a.wav") - tone(440)).max() < 1 / 32_000
    once = (tmp_path / "new" / "a.wav").read_bytes()
    write_wav(tmp_path / "new" / "a.wav", load_audio(tmp_path / "new" / "a.wav"))
    assert (tmp_path / "new" / "a.wav").read_bytes() == once


def test_too_loud_is_cut_off_and_does_not_wrap(tmp_path: Path) -> None:
    write_wav(tmp_path / "a.wav", np.array([1.5, -1.5, 1.0, 0.0], np.float32).repeat(1000))
    wav = load_audio(tmp_path / "a.wav")
    assert wav.max() == pytest.approx(1.0, abs=1e-4) and wav.min() == -1.0
    assert (wav[:1000] > 0.9).all() and (wav[1000:2000] < -0.9).all()


@pytest.mark.parametrize("note", ["even", "odd!", "größer · 大"])
def test_provenance_is_kept_and_shown_by_players(tmp_path: Path, note: str) -> None:
    given = {"model": "Qwen3-TTS", "note": note}
    write_wav(tmp_path / "a.wav", tone(440), provenance=given)
    assert read_provenance(tmp_path / "a.wav") == given
    with av.open(str(tmp_path / "a.wav")) as container:
        assert note in container.metadata["comment"]
    assert len(load_audio(tmp_path / "a.wav")) == SAMPLE_RATE_HZ


def test_a_file_without_provenance_has_none(tmp_path: Path) -> None:
    write_wav(tmp_path / "a.wav", tone(440))
    assert read_provenance(tmp_path / "a.wav") == {}
    (tmp_path / "a.mp3").write_bytes(b"no riff")
    with pytest.raises(AudioError, match="not a WAV file"):
        read_provenance(tmp_path / "a.mp3")


def test_what_is_no_waveform_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"shape \(2, 3\)"):
        write_wav(tmp_path / "a.wav", np.zeros((2, 3), np.float32))
    with pytest.raises(ValueError, match="NaN"):
        write_wav(tmp_path / "a.wav", np.array([np.nan], np.float32))
    assert list(tmp_path.iterdir()) == []
