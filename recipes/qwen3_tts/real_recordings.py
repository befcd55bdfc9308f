"""The real recordings that an evaluation compares with: the target's, and other people's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from audio import AudioError, load_audio
from rows import Row, read_rows
from scores import (
    SCORER_RATE_HZ,
    Embedding,
    SpeakerEncoder,
    Speakers,
    Unscorable,
    characters_per_second,
)
from sources import SUFFIXES

Failed = dict[str, dict[str, str]]
"""Recordings that could not be compared with, by their path: whose they are and why."""


def read_recordings(path: Path, speaker: str | None = None) -> list[Row]:
    """Rows of a JSONL file, or the audio files of a folder, of which a file's own folder names the speaker."""
    if not path.is_dir():
        return read_rows(path, needed=("audio",))
    files = sorted(file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES)
    if not files:
        raise ValueError(f"{path} holds no recordings ({', '.join(SUFFIXES)})")
    return [{"audio": str(file.resolve()), "speaker": (speaker or file.parent.name).lower()} for file in files]


def target_rows(
    path: Path | None, speaker: str | None, rows: list[Row], settings: Mapping[str, Any]
) -> tuple[str, list[Row]]:
    """The target's name, and real recordings of theirs: all of `path` that are by them, or else those of the texts.

    Without the reference: what the base model was shown of the voice is no fair measure of what it made of it.
    """
    named, shown = speaker or settings.get("speaker"), settings.get("ref_audio")
    if path is None:
        target = str(named or "target").lower()
        # The folder's own copies: the originals may have moved since, or be on another machine.
        own = [row for row in rows if row.get("real") and shown not in names_of(row)]
        return target, [{"audio": row["real"], "text": row["text"], "speaker": target} for row in own]
    real = read_recordings(path, named)
    speakers = sorted({row["speaker"].lower() for row in real if row.get("speaker")})
    if named is None and len(speakers) > 1:
        raise ValueError(f"{path} has several speakers ({', '.join(speakers)}): name the target with --speaker")
    target = str(named or (speakers or ["target"])[0]).lower()
    if speakers and target not in speakers:
        raise ValueError(f"{path} has no recordings of {target}; it has {', '.join(speakers)}")
    kept = [row for row in real if (row.get("speaker") or target).lower() == target and row["audio"] != shown]
    if not kept:
        raise ValueError(f"{path} has no recording of {target} apart from the reference {shown}")
    return target, kept


def names_of(row: Row) -> list[str]:
    """The paths by which a text's real recording may be known: the folder's copy and the original."""
    return [row[name] for name in ("real", "source") if row.get(name)]


def other_rows(path: Path | None, target: str) -> dict[str, list[Row]]:
    by_speaker: dict[str, list[Row]] = {}
    for row in read_recordings(path) if path is not None else ():
        if not row.get("speaker"):
            raise ValueError(f"{path} has a row without a speaker: {row['audio']}")
        by_speaker.setdefault(row["speaker"].lower(), []).append(row)
    by_speaker.pop(target, None)
    return by_speaker


def spread(rows: list[Row], most: int) -> list[Row]:
    """At most `most` of them, evenly from the first to the last: neighbours are often of one session."""
    if len(rows) <= most:
        return rows
    return [rows[k * len(rows) // most] for k in range(most)]


def embed_speakers(
    encoder: SpeakerEncoder, target: str, by_speaker: Mapping[str, list[Row]], failed: Failed
) -> Speakers:
    recordings: dict[str, dict[str, Embedding]] = {}
    for speaker, rows in by_speaker.items():
        own = recordings.setdefault(speaker, {})
        for row in rows:
            try:
                own[row["audio"]] = encoder.embed(load_audio(row["audio"], SCORER_RATE_HZ))
            except (AudioError, Unscorable) as error:
                failed[row["audio"]] = {"speaker": speaker, "reason": str(error)}
    return Speakers(target, recordings)


def pace_of(target: str, rows: list[Row], failed: Failed) -> float | None:
    """The target's characters a second, by the recordings whose text is known."""
    texts, durations_s = [], []
    for row in rows:
        if row.get("text"):
            try:
                durations_s.append(float(row.get("duration_s") or _measured_s(row["audio"])))
                texts.append(row["text"])
            except AudioError as error:
                failed[row["audio"]] = {"speaker": target, "reason": str(error)}
    return characters_per_second(texts, durations_s)


def _measured_s(path: str) -> float:
    return len(load_audio(path, SCORER_RATE_HZ)) / SCORER_RATE_HZ
