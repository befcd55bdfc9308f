"""What the folder of an exported voice says of itself; no model is loaded for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from qwen import TRAINED_FROM
from rows import Row, read_rows

CONSENT = "consent.json"
HELD_OUT = "held_out.jsonl"
"""What training held out: rows of text, audio and speaker."""


def settings_of(voice: Path) -> dict[str, Any]:
    if not (voice / "config.json").is_file():
        raise ValueError(f"{voice} has no config.json: name the folder that export.py wrote")
    settings: dict[str, Any] = json.loads((voice / "config.json").read_text(encoding="utf-8"))
    return settings


def speaker_of(voice: Path, asked: str | None) -> str:
    """The speaker that was asked for, or the only one."""
    settings = settings_of(voice)
    kind = settings.get("tts_model_type")
    if kind != "custom_voice":
        raise ValueError(f"{voice} is a {kind} model; a fine-tuned voice is expected, as export.py writes it")
    speakers = sorted(settings["talker_config"]["spk_id"])
    if asked is None and len(speakers) != 1:
        raise ValueError(f"{voice} has several speakers ({', '.join(speakers)}): choose one with --speaker")
    speaker = (asked or speakers[0]).lower()
    if speaker not in speakers:
        raise ValueError(f"{voice} has no speaker {speaker}; it has {', '.join(speakers)}")
    return speaker


def made_from(voice: Path) -> str | None:
    """The folder or hub id of its base model; None for a voice that does not say."""
    return settings_of(voice).get(TRAINED_FROM)


def recorded_consent(voice: Path) -> dict[str, Any] | None:
    """As it was stated when the voice was trained; None for a voice from elsewhere."""
    path = voice / CONSENT
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None


def held_out_texts(voice: Path, speaker: str) -> list[Row]:
    """Rows of what training held out of the speaker's."""
    path = voice / HELD_OUT
    if not path.is_file():
        raise ValueError(
            f"{voice} has no {HELD_OUT}, the texts that training held out: name others with --texts, a text a line, or "
            "JSONL rows with text"
        )
    rows = [row for row in read_rows(path, needed=("text", "speaker")) if str(row["speaker"]).lower() == speaker]
    if not rows:
        raise ValueError(f"{path} has no text of {speaker}: name others with --texts")
    return rows
