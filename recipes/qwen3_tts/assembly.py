"""Judges what the workers measured, and writes the voice's rows: the same files whatever the order of the work."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from quality import NARROW_BAND_DB, Limits, Measures, Problem, combined, judge_audio, judge_text
from recording import Record, Source
from results import Results
from rows import Row
from speakers import SAME_VOICE, sort_voices

REF_S = (3.0, 10.0)
"""A reference of this length carries the voice, and costs little."""


@dataclass
class Cut:
    """A segment on its way to being used or not."""

    source: Source
    row: Record
    problem: Problem | None
    similarity: float | None = None

    @property
    def order(self) -> tuple[str, str, str]:
        return self.source.speaker, self.source.relative, self.row["name"]


@dataclass(frozen=True)
class Assembled:
    kept: list[Row]
    rejected: list[Row]
    warnings: list[str]
    audio: set[Path]
    """All files that rows name."""


def assemble(
    records: Sequence[tuple[Source, Record]], results: Results, limits: Limits, check_speakers: bool = True
) -> Assembled:
    """Sorts all segments into used and rejected ones, and moves their audio to where it belongs."""
    cuts = [Cut(source, row, _problem(row, limits)) for source, record in records for row in record["segments"]]
    cuts.sort(key=lambda cut: cut.order)
    warnings = [text for _, record in sorted(records, key=lambda pair: pair[0].relative) for text in record["warnings"]]
    if check_speakers:
        warnings += _reject_other_speakers(cuts)
    used = [cut for cut in cuts if cut.problem is None]
    references, missing = _references(used)
    warnings += missing + _dull(used)
    audio = {_place(cut, results) for cut in cuts if cut.row["digest"] is not None}
    kept = [_kept_row(cut, results, results.places(cut.source, references[cut.source.speaker])[0]) for cut in used]
    rejected = [_rejected_row(cut, results) for cut in cuts if cut.problem]
    rejected += [
        {"source": source.path, "speaker": source.speaker, **whole}
        for source, record in records
        for whole in record["rejected"]
    ]
    rejected.sort(key=lambda row: (row["source"], row["start_s"] or 0.0))
    return Assembled(kept, rejected, warnings, audio)


def _problem(row: Record, limits: Limits) -> Problem | None:
    text = judge_text(row["text"], row["speech_s"], limits, row["cer"], row["heard"], row["confidence"])
    return combined(judge_audio(Measures(**row["measures"]), limits) + text)


def _reject_other_speakers(cuts: Sequence[Cut]) -> list[str]:
    """Only what would be used is compared: noise has no voice."""
    by_speaker: dict[str, list[Cut]] = defaultdict(list)
    for cut in cuts:
        if cut.problem is None:
            by_speaker[cut.source.speaker].append(cut)
    warnings = []
    for speaker, own in by_speaker.items():
        embeddings = [None if cut.row["voice"] is None else np.asarray(cut.row["voice"], np.float32) for cut in own]
        voices = sort_voices(embeddings, [cut.row["duration_s"] for cut in own])
        for cut, similarity in zip(own, voices.similarities, strict=True):
            cut.similarity = similarity
        for index in voices.others:
            alike = f"{own[index].similarity:.2f} similar to the rest of {speaker}'s"
            detail = f"its voice is {alike}, at least {SAME_VOICE} is usual"
            own[index].problem = Problem("other-speaker", detail)
        if text := voices.warning(speaker):
            warnings.append(text)
    return warnings


def _references(used: Sequence[Cut]) -> tuple[dict[str, Record], list[str]]:
    """Of each speaker the cleanest segment of a good length, to clone from and to compare with."""
    best: dict[str, Cut] = {}
    for cut in used:
        if cut.source.speaker not in best or _fitness(cut) > _fitness(best[cut.source.speaker]):
            best[cut.source.speaker] = cut
    low, high = REF_S
    warnings = [
        f"{speaker}: no segment has {low:.0f}-{high:.0f} s to be the reference; {cut.row['name']} with"
        f" {cut.row['duration_s']:.1f} s is taken"
        for speaker, cut in best.items()
        if not low <= cut.row["duration_s"] <= high
    ]
    return {speaker: cut.row for speaker, cut in best.items()}, warnings


def _fitness(cut: Cut) -> tuple[float, float]:
    """Nearness to a good length, then clearness; of equals the first is taken."""
    duration_s = cut.row["duration_s"]
    off_s = max(REF_S[0] - duration_s, duration_s - REF_S[1], 0.0)
    return -off_s, round(cut.row["measures"]["snr_db"], 1)


def _dull(used: Sequence[Cut]) -> list[str]:
    dull = sum(cut.row["measures"]["air_band_db"] < NARROW_BAND_DB for cut in used)
    if not dull:
        return []
    return [f"{dull} of {len(used)} segments have nothing above 8 kHz (16 kHz recordings?): the voice will sound dull"]


def _place(cut: Cut, results: Results) -> Path:
    used, rejected = results.places(cut.source, cut.row)
    wanted, other = (rejected, used) if cut.problem else (used, rejected)
    if results.find(cut.source, cut.row) == other:
        wanted.parent.mkdir(parents=True, exist_ok=True)
        other.replace(wanted)
    other.unlink(missing_ok=True)
    return wanted


def _kept_row(cut: Cut, results: Results, reference: Path) -> Row:
    row = cut.row
    return {
        "audio": str(results.places(cut.source, row)[0]),
        "text": row["text"],
        "speaker": cut.source.speaker,
        "ref_audio": str(reference),
        "language": row["language"],
        "duration_s": row["duration_s"],
        "source": cut.source.path,
        "start_s": row["start_s"],
        "end_s": row["end_s"],
        "transcript": row["transcript"],
        "snr_db": round(row["measures"]["snr_db"], 1),
        "cer": row["cer"],
        "confidence": row["confidence"],
        "similarity": cut.similarity,
    }


def _rejected_row(cut: Cut, results: Results) -> Row:
    row, problem = cut.row, cut.problem
    assert problem is not None
    found = {
        "source": cut.source.path,
        "start_s": row["start_s"],
        "end_s": row["end_s"],
        "speaker": cut.source.speaker,
        "reason": problem.reason,
        "detail": problem.detail,
        "text": row["text"],
    }
    return found | ({"audio": str(results.places(cut.source, row)[1])} if row["digest"] is not None else {})


def count(assembled: Assembled, num_sources: int) -> dict[str, Any]:
    """The run in figures, for process.json, the page and the last lines of the output."""
    speakers: dict[str, dict[str, Any]] = {}
    for row in assembled.kept:
        own = speakers.setdefault(row["speaker"], {"segments": 0, "minutes": 0.0, "ref_audio": row["ref_audio"]})
        own["segments"] += 1
        own["minutes"] += row["duration_s"] / 60
    for own in speakers.values():
        own["minutes"] = round(own["minutes"], 2)
    reasons: Mapping[str, int] = Counter(row["reason"] for row in assembled.rejected)
    return {
        "sources": num_sources,
        "sources_used": len({row["source"] for row in assembled.kept}),
        "segments": len(assembled.kept),
        "minutes": round(sum(row["duration_s"] for row in assembled.kept) / 60, 2),
        "rejected": len(assembled.rejected),
        "reasons": dict(sorted(reasons.items(), key=lambda pair: (-pair[1], pair[0]))),
        "speakers": speakers,
    }
