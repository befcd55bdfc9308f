"""Reads any audio or video file as mono float32, block by block, and writes WAV files that say where they come from."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from keepstep.data.fetch import whole_file

try:
    import av
    import soxr
except ImportError as error:
    raise SystemExit(
        "audio is read with PyAV and soxr, and one is not installed: pip install 'keepstep[voice]'"
    ) from error

SAMPLE_RATE_HZ = 24_000
"""What Qwen3-TTS's codec speaks."""
BLOCK_S = 10.0
"""How much audio a step of `stream_audio` carries: enough to resample well, little to hold."""
LOST_S = 0.02
"""A jump in FLAC's time stamps by more than this means a frame left out, not rounding."""
SILENT_CHANNEL = 1e-4
"""A channel with less than this share of the loudest one's energy (-40 dB) is hiss, and is not mixed in."""
CANCELLED_MIX = 0.1
"""A mix with less than this share of its channels' energy has cancelled itself out (one channel is wired reversed)."""

Wav = npt.NDArray[np.float32]


class AudioError(ValueError):
    """A file that can't be read as audio: the message says which, why, and what to do."""


@dataclass(frozen=True)
class AudioInfo:
    """What a file says of its first audio stream."""

    sample_rate_hz: int
    num_channels: int
    codec: str
    container: str
    duration_s: float | None
    """As the header has it, which may be wrong or missing."""


def load_audio(path: str | Path, sample_rate_hz: int = SAMPLE_RATE_HZ) -> Wav:
    """The whole file as mono float32 in [-1, 1] at `sample_rate_hz`; stereo is mixed down, see `channel_weights`."""
    return np.concatenate(list(stream_audio(path, sample_rate_hz)))


def stream_audio(path: str | Path, sample_rate_hz: int = SAMPLE_RATE_HZ) -> Iterator[Wav]:
    """The file's audio in consecutive mono blocks of some seconds: an hour-long file is never held in memory."""
    weights = channel_weights(path)
    rate_hz = audio_info(path).sample_rate_hz
    resampler = soxr.ResampleStream(rate_hz, sample_rate_hz, num_channels=1, dtype="float32")
    is_empty = True
    for mono in _blocks(path, weights, size=int(BLOCK_S * rate_hz)):
        block = resampler.resample_chunk(mono)
        is_empty = is_empty and len(block) == 0
        if len(block):
            yield block
    block = resampler.resample_chunk(np.zeros(0, np.float32), last=True)
    if len(block):
        yield block
    elif is_empty:
        raise AudioError(f"{path} has an audio stream without a single sample: the recording is empty")


def _blocks(path: str | Path, weights: Wav, size: int) -> Iterator[Wav]:
    """The mix of the channels at the file's own rate: decoders give some 20 ms a time, too little to resample well."""
    pieces: list[Wav] = []
    num_pending = 0
    for channels in _decoded(path):
        if not np.isfinite(channels).all():
            raise AudioError(
                f"{path} holds NaN or infinite samples: what wrote it was at fault, record or convert anew"
            )
        pieces.append((weights @ channels).astype(np.float32))
        num_pending += len(pieces[-1])
        if num_pending >= size:
            yield np.concatenate(pieces)
            pieces, num_pending = [], 0
    if pieces:
        yield np.concatenate(pieces)


def audio_info(path: str | Path) -> AudioInfo:
    with _opened(path) as container:
        stream = container.streams.audio[0]
        duration = container.duration / av.time_base if container.duration else None
        return AudioInfo(stream.rate, stream.channels, stream.codec_context.name, container.format.name, duration)


def channel_weights(path: str | Path) -> Wav:
    """How to mix the channels to one: the mean of those that carry sound, or the loudest if their mean cancels out."""
    num_channels = audio_info(path).num_channels
    if num_channels == 1:
        return np.ones(1, np.float32)
    # The energy of any mix w is w G w: one pass over the file, a few numbers, and all choices can be compared.
    gram = np.zeros((num_channels, num_channels))
    for channels in _decoded(path):
        wide = channels.astype(np.float64)
        gram += wide @ wide.T
    return weights_of(gram)


def weights_of(gram: npt.NDArray[np.float64]) -> Wav:
    energies = gram.diagonal()
    loudest = int(energies.argmax())
    active = energies > SILENT_CHANNEL * energies[loudest]
    if not active.any():  # digital silence, or NaN, which the reader of the blocks will name
        active[:] = True
    weights = active / active.sum()
    if weights @ gram @ weights < CANCELLED_MIX * energies[active].mean():
        weights = np.eye(len(energies))[loudest]
    return np.asarray(weights, np.float32)


def _decoded(path: str | Path) -> Iterator[Wav]:
    """Pieces [channels, n] of the first audio stream at its own rate."""
    with _opened(path) as container:
        stream = container.streams.audio[0]
        to_float = av.AudioResampler(format="fltp", layout=stream.layout.name, rate=stream.rate)
        num_samples = 0
        bad_packet = False
        for packet in container.demux(stream):
            try:
                frames = packet.decode()
            except av.FFmpegError:
                # Tags or a torn last packet at the end of a file are common and harmless. In the middle words are lost.
                bad_packet = True
                continue
            for frame in frames:
                if bad_packet or _lost_samples(frame, stream, num_samples):
                    raise AudioError(
                        f"{path} is damaged at {num_samples / stream.rate:.1f} s: its {stream.codec_context.name} data"
                        " can't be decoded. Get a whole copy, or keep what ffmpeg -i BAD -c:a flac GOOD.flac saves"
                    )
                num_samples += frame.samples
                yield from _as_float(path, to_float, frame)
        yield from _as_float(path, to_float, None)


def _lost_samples(frame: Any, stream: Any, num_samples: int) -> bool:
    """Whether FLAC's decoder has left a frame out in silence. Other formats may have gaps that are no damage."""
    if stream.codec_context.name != "flac" or frame.pts is None:
        return False
    start_s = float((stream.start_time or 0) * stream.time_base)
    return abs(float(frame.pts * frame.time_base) - start_s - num_samples / stream.rate) > LOST_S


def _as_float(path: str | Path, to_float: Any, frame: Any) -> Iterator[Wav]:
    """`frame` converted, or, for None, what the converter still holds."""
    try:
        for out in to_float.resample(frame):
            if out is not None and out.samples:
                yield out.to_ndarray()
    except (ValueError, av.FFmpegError) as error:
        raise AudioError(
            f"{path} changes its sample rate or channels midway, which is not supported: {error}"
        ) from error


def _opened(path: str | Path) -> Any:
    """The file opened by PyAV, with an audio stream in it."""
    path = Path(path)
    if not path.is_file():
        raise AudioError(f"{path} is not a file")
    if path.stat().st_size == 0:
        raise AudioError(f"{path} is empty: 0 bytes")
    try:
        # Text of tags in old encodings is not ours to judge.
        container = av.open(str(path), metadata_errors="replace")
        for stream in container.streams.audio:
            # Without it FLAC's decoder passes noise off as speech where its checksums fail.
            if stream.codec_context.name == "flac":
                stream.codec_context.options = {"err_detect": "crccheck+bitstream+buffer+explode"}
    except (av.FFmpegError, OSError) as error:
        raise AudioError(
            f"{path} can't be read: PyAV (FFmpeg's libraries) says '{_words(error)}'."
            " It is damaged, or no audio or video file in spite of its name"
        ) from error
    if not container.streams.audio:
        kinds = ", ".join(sorted({stream.type for stream in container.streams})) or "nothing"
        container.close()
        raise AudioError(f"{path} has no audio stream: it holds {kinds} only")
    if not container.streams.audio[0].rate:
        codec = container.streams.audio[0].codec_context.name
        container.close()
        raise AudioError(f"{path} can't be read: its {codec} audio stream states no sample rate, its header is damaged")
    return container


def _words(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


SOFTWARE = "keepstep recipes/qwen3_tts"


def write_wav(
    path: str | Path, wav: Wav, sample_rate_hz: int = SAMPLE_RATE_HZ, provenance: Mapping[str, str] | None = None
) -> None:
    """Writes mono PCM16; `provenance` goes into the RIFF INFO tags, where players and ffprobe show it as the comment.

    The file appears whole or not at all, and the same arguments give the same bytes.
    """
    wav = np.asarray(wav)
    if wav.ndim != 1:
        raise ValueError(f"expected a mono waveform of one dimension, found shape {wav.shape}")
    if not np.isfinite(wav).all():
        raise ValueError(f"{path} is not written: the waveform holds NaN or infinite samples")
    pcm = np.clip(np.round(wav * 32768.0), -32768, 32767).astype("<i2").tobytes()
    chunks = _chunk(b"fmt ", struct.pack("<HHIIHH", 1, 1, sample_rate_hz, 2 * sample_rate_hz, 2, 16))
    if provenance is not None:
        comment = json.dumps(dict(provenance), ensure_ascii=False, sort_keys=True)
        tags = _chunk(b"ISFT", SOFTWARE.encode() + b"\0") + _chunk(b"ICMT", comment.encode() + b"\0")
        chunks += _chunk(b"LIST", b"INFO" + tags)
    chunks += _chunk(b"data", pcm)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        file.write(_chunk(b"RIFF", b"WAVE" + chunks))


def read_provenance(path: str | Path) -> dict[str, str]:
    """What `write_wav` was given as provenance; other programs' INFO tags by their four letters, or {}."""
    content = Path(path).read_bytes()
    if content[:4] != b"RIFF" or content[8:12] != b"WAVE":
        raise AudioError(f"{path} is not a WAV file, the only kind whose provenance can be read")
    tags: dict[str, str] = {}
    for name, body in _chunks(content[12:]):
        if name == b"LIST" and body[:4] == b"INFO":
            for tag, value in _chunks(body[4:]):
                tags[tag.decode("ascii", "replace")] = value.rstrip(b"\0").decode("utf-8", "replace")
    try:
        provenance = json.loads(tags.get("ICMT", ""))
    except json.JSONDecodeError:  # a comment of somebody else's
        return tags
    return provenance if isinstance(provenance, dict) else tags


def _chunk(name: bytes, body: bytes) -> bytes:
    return name + struct.pack("<I", len(body)) + body + b"\0" * (len(body) % 2)


def _chunks(content: bytes) -> Iterator[tuple[bytes, bytes]]:
    at = 0
    while at + 8 <= len(content):
        size = int.from_bytes(content[at + 4 : at + 8], "little")
        yield content[at : at + 4], content[at + 8 : at + 8 + size]
        at += 8 + size + size % 2
