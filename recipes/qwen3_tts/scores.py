"""Measures speech: whose voice it is, what was said, how clean it sounds; and how sure the figures are.

Every scorer loads its model once, when it is made, and stands alone: a package that is missing raises Unavailable
there, and costs one column.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

SCORER_RATE_HZ = 16_000
"""All scorers were trained on speech at this rate: load_audio(path, SCORER_RATE_HZ)."""
MIN_VOICED_S = 0.5
"""Of less speech an embedding says little about the voice."""
LEVEL_DBFS = -25.0
"""Of speech that is embedded. The same recording 14 dB quieter has a similarity of 0.9 to itself, not 1: unlevelled,
how loud a model speaks would count as whose voice it has."""
SILENT = 1e-4
"""A peak below -80 dB of full scale is silence."""
NUM_RESAMPLES = 2000

Wav = npt.NDArray[np.float32]
Embedding = npt.NDArray[np.float32]
"""[256], of length 1."""


class Unavailable(ValueError):
    """A scorer that can't be used here: the message says why, and what to install or to name."""


class Unscorable(ValueError):
    """A recording that a scorer has no score for: the message says why."""


# ---- how sure a mean is


@dataclass(frozen=True)
class Summary:
    """A mean with its 95% bootstrap interval over recordings, which a single recording does not have."""

    n: int
    mean: float
    low: float | None
    high: float | None

    def __str__(self) -> str:
        interval = f" [{self.low:.2f}, {self.high:.2f}]" if self.low is not None else ""
        return f"{self.mean:.2f}{interval}"

    def overlaps(self, other: Summary) -> bool:
        """True also where an interval is missing: then nothing tells the two apart."""
        if self.low is None or self.high is None or other.low is None or other.high is None:
            return True
        return self.low <= other.high and other.low <= self.high


def summarise(values: Sequence[float], weights: Sequence[float] | None = None, seed: int = 0) -> Summary | None:
    """None for no values. With weights a mean of rates is the rate of the whole: errors of all words by all words."""
    if not len(values):
        return None
    x = np.asarray(values, np.float64)
    w = np.ones_like(x) if weights is None else np.asarray(weights, np.float64)
    mean = float((x * w).sum() / w.sum())
    if len(x) < 2:
        return Summary(1, mean, None, None)
    drawn = np.random.default_rng(seed).integers(0, len(x), (NUM_RESAMPLES, len(x)))
    means = (x * w)[drawn].sum(1) / w[drawn].sum(1)
    low, high = np.percentile(means, [2.5, 97.5])
    return Summary(len(x), mean, float(low), float(high))


# ---- whose voice it is


class SpeakerEncoder:
    """Resemblyzer's embedding: recordings of one voice lie close together, whatever is said."""

    def __init__(self, device: str = "cpu") -> None:
        self._package = _import_resemblyzer()
        self._encoder = self._package.VoiceEncoder(device, verbose=False).eval()

    def embed(self, wav: Wav) -> Embedding:
        """`wav` at SCORER_RATE_HZ. Prepared as by preprocess_wav, but always at one level: see LEVEL_DBFS."""
        audio = self._package.audio
        _require_sound(wav)
        # Made louder, a peak may pass full scale, which the 16 bits of the voice detector would wrap around.
        voiced = audio.trim_long_silences(np.clip(audio.normalize_volume(wav, LEVEL_DBFS), -1.0, 1.0))
        if len(voiced) < MIN_VOICED_S * SCORER_RATE_HZ:
            raise Unscorable(
                f"{len(voiced) / SCORER_RATE_HZ:.1f} s of {len(wav) / SCORER_RATE_HZ:.1f} s sound like speech, and "
                f"{MIN_VOICED_S} s are needed"
            )
        levelled = audio.normalize_volume(voiced, LEVEL_DBFS).astype(np.float32)
        return np.asarray(self._encoder.embed_utterance(levelled), np.float32)


def _import_resemblyzer() -> ModuleType:
    # webrtcvad asks pkg_resources for its own version, and setuptools no longer brings that module.
    absent = importlib.util.find_spec("pkg_resources") is None
    if absent:
        stand_in = ModuleType("pkg_resources")
        stand_in.get_distribution = importlib.metadata.distribution  # type: ignore[attr-defined]
        sys.modules["pkg_resources"] = stand_in
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it imports from where SciPy no longer wants it to
            import resemblyzer
    except ImportError as error:
        raise Unavailable(
            f"speaker similarity needs resemblyzer ({_first_line(error)}): pip install 'keepstep[voice]'"
        ) from error
    finally:
        if absent:
            del sys.modules["pkg_resources"]
    return resemblyzer


@dataclass(frozen=True)
class Place:
    """Where a recording lies among the speakers."""

    similarity: float
    """Cosine to the target's mean."""
    rank: int
    """Of the target among all speakers: 1 where no other is closer."""
    nearest: str
    to_each: dict[str, float]


class Speakers:
    """The target among other speakers, each by the mean of real recordings of theirs."""

    def __init__(self, target: str, recordings: Mapping[str, Mapping[str, Embedding]]) -> None:
        """`recordings`: of each speaker, by a name that tells them apart."""
        if not recordings.get(target):
            raise ValueError(f"there is no recording of {target} to compare with")
        self.target = target
        self._recordings = recordings

    @property
    def names(self) -> list[str]:
        return [self.target, *sorted(name for name, own in self._recordings.items() if own and name != self.target)]

    def place(self, embedding: Embedding, without: Collection[str] = ()) -> Place:
        """`without`: the recording's own names, as it may be one of those compared with: nothing vouches for itself."""
        to_each = {}
        for name in self.names:
            others = [other for key, other in self._recordings[name].items() if key not in without]
            if others:
                to_each[name] = float(embedding @ mean_voice(others))
        if self.target not in to_each:
            raise Unscorable(f"it is the only recording of {self.target}, and there is no other to compare it with")
        similarity = to_each[self.target]
        closer = sum(other > similarity for other in to_each.values())
        return Place(similarity, 1 + closer, max(to_each, key=lambda name: to_each[name]), to_each)

    def same_speaker(self) -> list[float]:
        """How similar the target's own recordings are to their others, one left out at a time."""
        own = self._recordings[self.target]
        if len(own) < 2:
            return []
        return [self.place(embedding, without=[key]).similarity for key, embedding in own.items()]

    def different_speakers(self) -> list[float]:
        """How similar everybody else's recordings are to the target."""
        target = mean_voice(list(self._recordings[self.target].values()))
        return [float(other @ target) for name in self.names[1:] for other in self._recordings[name].values()]


def mean_voice(embeddings: Sequence[Embedding]) -> Embedding:
    mean = np.mean(np.stack(list(embeddings)), axis=0)
    return np.asarray(mean / np.linalg.norm(mean), np.float32)


# ---- what was said


class Transcriber:
    """A Whisper model of faster-whisper, made repeatable: it keeps nothing of what it heard before."""

    def __init__(self, model: str, device: str = "cpu", language: str | None = None) -> None:
        """`model`: a size (tiny, base, small, medium, large-v3), or a folder. `language`: as de; None to detect it."""
        try:
            from faster_whisper import WhisperModel
        except ImportError as error:
            raise Unavailable(
                f"WER needs faster-whisper ({_first_line(error)}): pip install 'keepstep[voice]'"
            ) from error
        if importlib.util.find_spec("jiwer") is None:
            raise Unavailable("WER needs jiwer: pip install 'keepstep[voice]'")
        given_as_folder = Path(model).is_dir() or Path(model).is_absolute()
        if given_as_folder and not (Path(model) / "model.bin").is_file():
            raise Unavailable(f"{model} has no model.bin: name a folder of a faster-whisper model, or a size as small")
        try:
            self._model = WhisperModel(model, device=device, compute_type="int8" if device == "cpu" else "float16")
        except Exception as error:  # the hub's and CTranslate2's exceptions share no base
            raise Unavailable(f"the ASR model {model} could not be loaded: {_first_line(error)}") from error
        self._language = language

    def transcribe(self, wav: Wav) -> str:
        """`wav` at SCORER_RATE_HZ. Nothing heard is an empty text, which counts: every word is an error."""
        if not len(wav):
            return ""
        import ctranslate2

        # Where it goes round in circles, as on noise, Whisper tries again by sampling.
        ctranslate2.set_random_seed(0)
        segments, _ = self._model.transcribe(
            wav, language=self._language, beam_size=5, condition_on_previous_text=False
        )
        return " ".join(segment.text.strip() for segment in segments).strip()


# ---- how clean it sounds


class Quality:
    """DNSMOS P.835 as the speechmos package carries it: what listeners would say, from 1 (bad) to 5 (excellent)."""

    def __init__(self, num_threads: int = 0) -> None:
        """`num_threads`: 0 leaves it to ONNX Runtime."""
        try:
            import onnxruntime
            from speechmos import dnsmos
        except ImportError as error:
            raise Unavailable(
                f"DNSMOS needs speechmos ({_first_line(error)}): pip install 'keepstep[voice]'"
            ) from error
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = num_threads
        models = Path(dnsmos.__file__).parent / "dnsmos_models"
        # Its own constructor takes neither threads nor a provider, and warns where there is a GPU.
        self._model = dnsmos.DNSMOS.__new__(dnsmos.DNSMOS)
        for name, file in (("onnx_sess", "sig_bak_ovr.onnx"), ("p808_onnx_sess", "model_v8.onnx")):
            session = onnxruntime.InferenceSession(str(models / file), options, providers=["CPUExecutionProvider"])
            setattr(self._model, name, session)

    def score(self, wav: Wav) -> dict[str, float]:
        """`wav` at SCORER_RATE_HZ: overall, of the speech, of the background, and the older P.808 overall score."""
        _require_sound(wav)  # it repeats what is shorter than 9 s until it is not: nothing, for ever
        found: dict[str, Any] = self._model(np.clip(wav, -1.0, 1.0), SCORER_RATE_HZ, False)
        names = {"overall": "ovrl_mos", "speech": "sig_mos", "background": "bak_mos", "p808": "p808_mos"}
        return {name: float(found[theirs]) for name, theirs in names.items()}


# ---- how long it takes


def characters_per_second(texts: Sequence[str], durations_s: Sequence[float]) -> float | None:
    """A speaker's pace, by which a text without a recording is expected to take its time; None if nothing says it."""
    total_s = sum(durations_s)
    return sum(len(text) for text in texts) / total_s if total_s > 0 and any(texts) else None


def duration_ratio(
    duration_s: float, text: str, real_duration_s: float | None, pace: float | None
) -> tuple[float, str] | None:
    """To the real recording of the same text, or to what the speaker's pace lets expect; and which of the two."""
    if real_duration_s:
        return duration_s / real_duration_s, "real"
    if pace and text:
        return duration_s * pace / len(text), "pace"
    return None


def _require_sound(wav: Wav) -> None:
    if not len(wav):
        raise Unscorable("it is empty")
    if np.abs(wav).max() < SILENT:
        raise Unscorable("it is silent")


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
