"""The scores of one recording, and of one text as each system says it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from audio import AudioError, load_audio
from evaluation_folder import SYSTEMS
from real_recordings import names_of
from rows import Row
from scores import (
    SCORER_RATE_HZ,
    Quality,
    SpeakerEncoder,
    Speakers,
    Transcriber,
    Unavailable,
    Unscorable,
    Wav,
    duration_ratio,
)
from spoken import compare

Scorer = TypeVar("Scorer")


@dataclass
class Scorers:
    """Those that can be used here, and why the others can't."""

    encoder: SpeakerEncoder | None = None
    transcriber: Transcriber | None = None
    quality: Quality | None = None
    left_out: dict[str, str] = field(default_factory=dict)

    def load(self, column: str, skip: Sequence[str], make: Callable[[], Scorer]) -> Scorer | None:
        if column in skip:
            self.left_out[column] = "left out by --skip"
            return None
        try:
            return make()
        except Unavailable as error:
            self.left_out[column] = str(error)
            return None


@dataclass
class Measure:
    """All that a recording is measured with."""

    scorers: Scorers
    speakers: Speakers | None
    pace: float | None
    """The target's characters a second."""

    def recording(self, path: str, text: str, real: Wav | None, without: Collection[str] = ()) -> dict[str, Any]:
        """Its scores; what could not be scored is under `missing`, with the reason. `without`: see Speakers.place."""
        found: dict[str, Any] = {"audio": path, "missing": {}}
        try:
            wav = load_audio(path, SCORER_RATE_HZ)
        except AudioError as error:
            found["missing"]["audio"] = str(error)
            return found
        found["duration_s"] = len(wav) / SCORER_RATE_HZ
        for name, score in (("similarity", self._voice), ("wer", self._words), ("dnsmos", self._quality)):
            try:
                found |= score(wav, text, without)
            except Unscorable as error:
                found["missing"][name] = str(error)
        real_s = len(real) / SCORER_RATE_HZ if real is not None else None
        if ratio := duration_ratio(found["duration_s"], text, real_s, self.pace):
            found["duration_ratio"], found["duration_basis"] = ratio
        return found

    def _voice(self, wav: Wav, _text: str, without: Collection[str]) -> dict[str, Any]:
        if self.scorers.encoder is None or self.speakers is None:
            return {}
        place = self.speakers.place(self.scorers.encoder.embed(wav), without)
        return asdict(place)

    def _words(self, wav: Wav, text: str, _without: Collection[str]) -> dict[str, Any]:
        if self.scorers.transcriber is None or not text:
            return {}
        transcript = self.scorers.transcriber.transcribe(wav)
        errors = compare(text, transcript)
        return asdict(errors) | {"transcript": transcript, "wer": errors.wer, "cer": errors.cer}

    def _quality(self, wav: Wav, _text: str, _without: Collection[str]) -> dict[str, Any]:
        if self.scorers.quality is None:
            return {}
        score = self.scorers.quality.score(wav)
        return {"dnsmos": score["overall"], "dnsmos_parts": score}


def measure_row(measure: Measure, row: Row) -> dict[str, Any]:
    """One text: its recording by each system that has one."""
    scored: dict[str, Any] = {"id": row["id"], "text": row["text"]}
    real = _audio_or_none(row.get("real"))
    for system in SYSTEMS:
        if not row.get(system):
            continue
        if system == "real":
            found = measure.recording(row["real"], row["text"], None, names_of(row))
            found.pop("duration_ratio", None)  # it is what the others are compared with
        else:
            found = measure.recording(row[system], row["text"], real)
            found["cut"] = bool(row.get("cut", {}).get(system))
            seconds = row.get("seconds", {}).get(system)
            if seconds is not None and found.get("duration_s"):
                found["real_time_factor"] = seconds / found["duration_s"]
        scored[system] = found
    return scored


def _audio_or_none(path: str | None) -> Wav | None:
    try:
        return load_audio(path, SCORER_RATE_HZ) if path else None
    except AudioError:  # named where the recording itself is scored
        return None
