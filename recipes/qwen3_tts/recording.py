"""What a worker does with one recording: finds its speech, cuts it with its words, measures and writes each segment."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import soxr
import xxhash
from audio import SAMPLE_RATE_HZ, AudioError, Wav, audio_info, stream_audio, write_wav
from quality import SILENT_DBFS, measure
from scores import SCORER_RATE_HZ, SpeakerEncoder, Unscorable
from segments import (
    MAX_SEGMENT_S,
    MIN_SEGMENT_S,
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
from spoken import spoken_form
from transcripts import AUTO, LANGUAGES, OtherLanguage, Recogniser, align, confidence, disagreement

VERSION = 2
"""Raised when a recording would be cut or measured in another way: results of older versions are made anew."""
TARGET_LUFS = -23.0
"""EBU R 128: all segments are equally loud, and peaks have room."""
PEAK = 0.89
"""-1 dBFS: loudness gives way to it."""
MAX_KEPT_S = 60.0
"""Of what is too long to use the audio is kept up to here, for listening; minutes of music are not."""
DOUBTFUL = 0.55
"""Segments with words less sure than this are heard again, alone, where Whisper makes up less."""
MISSING_S, MISSING_SHARE = 1.0, 0.05
"""A file that ends earlier than its header says, by more than both, was cut short."""

Record = dict[str, Any]


@dataclass(frozen=True)
class Source:
    """A recording, and what is to become of it."""

    path: str
    relative: str
    """Below the input folder."""
    name: str
    """Of its segments, with a number each."""
    speaker: str
    text: str | None
    """The given transcript, if there is one."""
    size: int
    modified_ns: int


@dataclass(frozen=True)
class Settings:
    """What decides how a recording is cut, besides the recording."""

    asr_model: str | None
    """Hears what has no transcript, and what given ones are compared with."""
    language: str
    """Whisper's letters, or auto."""


class Recorder:
    """Holds the models, loaded once, and takes one recording after another."""

    def __init__(self, output_dir: Path, settings: Settings, device: str = "cpu", num_threads: int = 1) -> None:
        self._output_dir = output_dir
        self._settings = settings
        self._detect = SpeechDetector()
        self._encoder = SpeakerEncoder(device)
        model = settings.asr_model
        self._recogniser = Recogniser(model, device, num_threads) if model else None

    def process(self, source: Source) -> Record:
        """{segments, rejected, warnings, duration_s}; the audio of all segments is written, whether good or not."""
        try:
            return self._processed(source)
        except AudioError as error:
            return _rejected("unreadable", str(error).replace(source.path, "it", 1))  # every row names its source
        except OtherLanguage as error:
            return _rejected("other-language", str(error))
        except Exception as error:  # one recording must not stop the others; it is named, and tried again next time
            where = traceback.format_exc(limit=-3)
            return _rejected("failed", f"{type(error).__name__}: {error}") | {"retry": True, "traceback": where}

    def _processed(self, source: Source) -> Record:
        if source.text is not None and not spoken_form(source.text):
            return _rejected("no-transcript", f"its transcript has no words: {source.text!r}")
        if source.text is None and self._recogniser is None:
            return _rejected(
                "no-transcript", "no transcript names it, and no --asr-model is given to hear what is said"
            )
        duration_s, spans, levels_db = self._listen(source)
        if not spans:
            loudest = float(levels_db.max(initial=-120.0))
            if loudest < SILENT_DBFS:
                return _rejected("silent", f"{duration_s:.1f} s, nowhere louder than {loudest:.0f} dBFS")
            return _rejected("no-speech", f"no speech was found in its {duration_s:.1f} s")
        is_long = whole(spans, "", duration_s).duration_s > MAX_SEGMENT_S
        if is_long and self._recogniser is None:
            detail = f"{duration_s:.1f} s: to split its transcript the times of the words are needed, give --asr-model"
            return _rejected("too-long", detail)
        heard, language = self._hear(source, spans, is_long)
        if source.text is None:
            segments = plan(spans, heard, levels_db)
        elif is_long:
            segments = plan(spans, align(source.text, heard), levels_db, words_are_heard=False)
        else:
            segments = [whole(spans, source.text, duration_s)]
        rows = []
        for number, wav in enumerate(cut_all(stream_audio(source.path), segments), 1):
            segment, own = self._heard_again(source, segments[number - 1], wav, heard, language)
            row = self._write(f"{source.name}-{number:04}", source, segment, wav)
            row |= {
                "language": LANGUAGES.get(language, AUTO),
                "measures": asdict(measure(wav, segment.start_s, spans, levels_db)),
            }
            rows.append(row | _text_figures(source, segment, spans, own))
        warnings = [_cut_short(source, duration_s)]
        return {"segments": rows, "rejected": [], "warnings": [w for w in warnings if w], "duration_s": duration_s}

    def _listen(self, source: Source) -> tuple[float, list[Span], npt.NDArray[np.float32]]:
        """How long the recording is, where speech is, and how loud it is; an hour takes a megabyte."""
        spans: list[Span] = []
        levels: list[npt.NDArray[np.float32]] = []
        duration_s = 0.0
        for stretch in stretches(stream_audio(source.path), self._detect):
            spans += stretch.spans
            levels.append(frame_levels_db(stretch.wav))
            duration_s = stretch.start_s + len(stretch.wav) / SAMPLE_RATE_HZ
        return duration_s, spans, np.concatenate(levels)

    def _hear(self, source: Source, spans: Sequence[Span], is_long: bool) -> tuple[list[Word], str]:
        """The words that were recognised, where they are needed to cut, and the language."""
        language = self._settings.language
        if self._recogniser is None:
            return [], language
        spoken = phrases(spans)
        if language == "auto":
            longest = max(spoken, key=lambda phrase: phrase.duration_s)  # tells most, and more than a "hm" at the start
            (wav,) = cut_all(stream_audio(source.path), [longest])
            language = self._recogniser.language(wav)
        words: list[Word] = []
        if source.text is None or is_long:
            for phrase, wav in zip(spoken, cut_all(stream_audio(source.path), spoken), strict=True):
                words += self._recogniser.words(wav, language, phrase.start_s)
        return words, language

    def _heard_again(
        self, source: Source, segment: Segment, wav: Wav, heard: Sequence[Word], language: str
    ) -> tuple[Segment, list[Word] | None]:
        """The segment, with its words anew where they were in doubt, and what was heard to compare its text with."""
        inside = [w for w in heard if segment.start_s <= (w.start_s + w.end_s) / 2 <= segment.end_s]
        is_usable = MIN_SEGMENT_S <= segment.duration_s <= MAX_SEGMENT_S
        if source.text is None:
            compared, is_asked = None, segment.is_doubtful or confidence(segment.words) < DOUBTFUL
        else:  # given: what was heard to cut it is compared already
            compared, is_asked = inside or None, not inside
        if self._recogniser is None or not is_usable or not is_asked:
            return segment, compared
        # Alone: what is heard now is said in this segment and nowhere else.
        again = self._recogniser.words(wav, language, segment.start_s)
        if source.text is None:
            segment = replace(segment, words=tuple(again))
        return segment, again

    def _write(self, name: str, source: Source, segment: Segment, wav: Wav) -> Record:
        row: Record = {
            "name": name,
            "start_s": round(segment.start_s, 3),
            "end_s": round(segment.end_s, 3),
            "duration_s": round(len(wav) / SAMPLE_RATE_HZ, 3),
            "text": segment.text,
            "digest": None,
            "voice": None,
        }
        if segment.duration_s <= MAX_KEPT_S:
            path = self._output_dir / "segments" / source.speaker / f"{name}.wav"
            made_of = {"source": source.relative, "speaker": source.speaker, "start_s": f"{segment.start_s:.3f}"}
            write_wav(path, normalised(wav), provenance={"made_by": "process.py"} | made_of)
            row["digest"] = digest(path)
            row["voice"] = self._voice(wav)
        return row

    def _voice(self, wav: Wav) -> list[float] | None:
        try:
            embedding = self._encoder.embed(np.asarray(soxr.resample(wav, SAMPLE_RATE_HZ, SCORER_RATE_HZ), np.float32))
        except Unscorable:  # too little speech: it is judged by its other figures
            return None
        return [round(float(value), 4) for value in embedding]


def digest(path: Path) -> str:
    """Tells whether a file is the one that was written."""
    return xxhash.xxh3_64_hexdigest(path.read_bytes())


def normalised(wav: Wav) -> Wav:
    """At TARGET_LUFS, or as near to it as its peak allows."""
    peak = float(np.abs(wav).max(initial=0.0))
    if peak == 0.0:
        return wav
    loudness = loudness_lufs(wav)
    gain = 10 ** ((TARGET_LUFS - loudness) / 20) if np.isfinite(loudness) else 1.0
    return np.asarray(wav * min(gain, PEAK / peak), np.float32)


def loudness_lufs(wav: Wav) -> float:
    """Integrated loudness; of less than one gating block (0.4 s) the plain power, which is close to it for speech."""
    import pyloudnorm

    meter = pyloudnorm.Meter(SAMPLE_RATE_HZ)
    if len(wav) <= meter.block_size * SAMPLE_RATE_HZ:
        return float(10 * np.log10(np.mean(wav.astype(np.float64) ** 2) + 1e-12))
    return float(meter.integrated_loudness(wav.astype(np.float64)))


def _text_figures(source: Source, segment: Segment, spans: Sequence[Span], heard: Sequence[Word] | None) -> Record:
    """How sure the text is: compared with what was heard, and the recogniser's own doubt."""
    speech_s = sum(max(0.0, min(s.end_s, segment.end_s) - max(s.start_s, segment.start_s)) for s in spans)
    figures: Record = {
        "speech_s": round(speech_s, 3),
        "transcript": "asr",
        "cer": None,
        "heard": None,
        "confidence": None,
    }
    if source.text is not None:
        figures["transcript"] = "given"
    else:
        figures["confidence"] = round(confidence(segment.words), 3)
    if heard is not None and spoken_form(segment.text):
        figures["heard"] = "".join(word.text for word in heard).strip()
        figures["cer"] = round(disagreement(segment.text, figures["heard"]), 3)
    return figures


def _cut_short(source: Source, duration_s: float) -> str | None:
    promised_s = audio_info(source.path).duration_s or 0.0
    missing_s = promised_s - duration_s
    if missing_s > MISSING_S and missing_s > MISSING_SHARE * promised_s:
        return (
            f"{source.relative} ends after {duration_s:.1f} s, but its header promises {promised_s:.1f} s: is it whole?"
        )
    return None


def _rejected(reason: str, detail: str) -> Record:
    whole_source = {"start_s": None, "end_s": None, "reason": reason, "detail": detail}
    return {"segments": [], "rejected": [whole_source], "warnings": [], "duration_s": 0.0}
