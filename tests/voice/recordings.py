"""Real recordings by speaker."""

from __future__ import annotations

from pathlib import Path


def recordings(speech: Path, speaker: str) -> list[tuple[Path, str]]:
    """(file, text) of a speaker, as metadata.csv has them."""
    lines = (speech / "metadata.csv").read_text().splitlines()[1:]
    rows = [line.split("|") for line in lines]
    return [(speech / f"{name}.flac", text) for name, text, who in rows if who == speaker]
