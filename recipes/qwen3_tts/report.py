"""The page of a processed voice: what was kept and how long it is, what was not and why, players to judge by ear."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rows import Row
from segments import MAX_SEGMENT_S

from keepstep.data.fetch import whole_file

NUM_PLAYERS = 12
"""Of each speaker: enough to hear the room, the pace and the cuts."""
MAX_REJECTS = 200
"""In the table; rejected.jsonl has all."""
MEANINGS = {
    "clipped": "the recording level was too high, peaks are cut off",
    "crashed": "workers died of it",
    "failed": "an error of the program; it is tried again next time",
    "implausible-pace": "too few or too many letters for the time",
    "narrow-band": "telephone sound, nothing above 4 kHz",
    "no-recording": "a transcript that fits no recording",
    "no-speech": "sound, but nobody speaks",
    "no-transcript": "nothing tells what is said",
    "no-words": "speech in which no words were recognised",
    "noisy": "too much background",
    "other-language": "a language that the model does not speak",
    "other-speaker": "the voice is not like the rest of the set",
    "silent": "nothing to be heard",
    "too-long": "no place to cut was found within 15 s",
    "too-quiet": "speech too soft to be made louder",
    "too-short": "less than a second",
    "transcript-mismatch": "the given text is not what is said",
    "unreadable": "damaged, empty, or no audio",
    "unsure-transcript": "the recogniser was guessing",
}

_STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1c2430; background: #fff; max-width: 1100px; margin: 2rem auto;
       padding: 0 1.5rem; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2.25rem 0 .6rem; }
.note { color: #66707d; font-size: .85rem; } .from { color: #55606e; margin: .15rem 0 1.25rem; }
.totals { display: flex; flex-wrap: wrap; gap: .75rem; }
.totals div { flex: 1 1 8rem; background: #f5f7fb; border-radius: 4px; padding: .6rem .9rem; }
.totals b { display: block; font-size: 1.5rem; line-height: 1.2; font-variant-numeric: tabular-nums; }
.warnings { border-left: 5px solid #b45309; background: #fdf6ec; padding: .6rem 1.1rem; margin: 1rem 0 0;
            list-style: none; }
.warnings li { margin: .2rem 0; overflow-wrap: anywhere; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .35rem .8rem .35rem 0; border-bottom: 1px solid #e3e7ec; vertical-align: top; }
thead th { color: #55606e; font-size: .85rem; font-weight: 600; } .num { text-align: right; white-space: nowrap; }
td.num, th.num { padding-right: 2rem; width: 7rem; }
td.reason { white-space: nowrap; font-weight: 600; } td.where { overflow-wrap: anywhere; min-width: 9rem; }
.bar { background: #b45309; height: .8rem; border-radius: 2px; min-width: 2px; margin-top: .35rem; }
.chart { display: block; width: 100%; height: auto; } .chart text { font: 12px system-ui, sans-serif; fill: #55606e; }
.players { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 1rem 1.75rem; }
.players p { margin: 0 0 .3rem; } audio { width: 100%; height: 34px; display: block; } td audio { width: 15rem; }
.tag { background: #e6edfb; color: #1d4ed8; border-radius: 3px; padding: 0 .4em; font-size: .8rem; font-weight: 600; }
@media (max-width: 720px) { .players { grid-template-columns: 1fr; } }
"""


def write_report(path: Path, kept: Sequence[Row], rejected: Sequence[Row], summary: Mapping[str, Any]) -> None:
    """`summary` is what process.json has. Nothing is loaded from elsewhere: the page and its folder can be moved."""
    counts = summary["counts"]
    speakers = ", ".join(counts["speakers"]) or "nobody"
    parts = [
        f"<h1>Recordings of {escape(speakers)}</h1>",
        f"<p class='from'>{escape(_made_with(summary, kept))}</p>",
        _totals(counts),
        _warnings(summary["warnings"]),
        _durations(kept),
        _speakers(counts, path.parent),
        _reasons(counts),
        _players(kept, path.parent),
        _rejects(rejected, path.parent, summary["input_dir"]),
    ]
    content = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>Recordings of {escape(speakers)}</title>"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head>\n<body>\n" + "\n".join(filter(None, parts)) + "\n</body></html>\n"
    )
    with whole_file(path) as file:
        file.write(content.encode())


def _made_with(summary: Mapping[str, Any], kept: Sequence[Row]) -> str:
    model = summary["settings"]["asr_model"]
    texts = {
        "asr": f"words by {Path(model or '').name}",
        "given": f"given transcripts, {'compared' if model else 'not compared'} with what is said",
    }
    kinds = sorted({row["transcript"] for row in kept})
    note = summary["consent"].get("note")
    stated = f"consent stated{f': {note}' if note else ''}"
    return " · ".join([f"from {summary['input_dir']}", *(texts[kind] for kind in kinds), stated])


def _totals(counts: Mapping[str, Any]) -> str:
    mean_s = 60 * counts["minutes"] / counts["segments"] if counts["segments"] else 0.0
    figures = [
        (f"{counts['minutes']:.1f} min", "of speech kept"),
        (f"{counts['segments']:,}", "segments kept"),
        (f"{mean_s:.1f} s", "mean length"),
        (f"{counts['sources_used']:,} of {counts['sources']:,}", "recordings used"),
        (f"{counts['rejected']:,}", "rejected"),
    ]
    return "<div class='totals'>" + "".join(f"<div><b>{value}</b>{label}</div>" for value, label in figures) + "</div>"


def _warnings(warnings: Sequence[str]) -> str:
    return (
        "<ul class='warnings'>" + "".join(f"<li>{escape(text)}</li>" for text in warnings) + "</ul>" if warnings else ""
    )


def _durations(kept: Sequence[Row]) -> str:
    """A histogram, a second a bar."""
    num_bins = int(MAX_SEGMENT_S)
    bins = [0] * num_bins
    for row in kept:
        bins[min(int(row["duration_s"]), num_bins - 1)] += 1
    left, top, width, height = 40, 20, 1000, 150
    step, most = width / num_bins, max(bins, default=0) or 1
    shapes = []
    for index, number in enumerate(bins):
        x, tall = left + index * step, height * number / most
        shapes.append(f'<text x="{x:.0f}" y="{top + height + 16}" text-anchor="middle">{index}</text>')
        if number:
            shapes.append(
                f'<rect x="{x + 2:.1f}" y="{top + height - tall:.1f}" width="{step - 4:.1f}" height="{tall:.1f}"'
                ' rx="2" fill="#1d4ed8"/>'
                f'<text x="{x + step / 2:.1f}" y="{top + height - tall - 5:.1f}" text-anchor="middle">{number}</text>'
            )
    end = left + width
    shapes.append(f'<text x="{end}" y="{top + height + 16}" text-anchor="middle">{num_bins} s</text>')
    shapes.append(f'<path d="M{left} {top + height}H{end}" stroke="#aab2bd"/>')
    return (
        "<h2>Length of the segments</h2>"
        f'<svg class="chart" viewBox="0 0 {width + 2 * left} {top + height + 24}" role="img"'
        f' aria-label="Number of segments by their length in seconds">{"".join(shapes)}</svg>'
    )


def _speakers(counts: Mapping[str, Any], folder: Path) -> str:
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td class='num'>{own['segments']:,}</td><td class='num'>{own['minutes']:.1f}</td>"
        f"<td>{_audio(own['ref_audio'], folder)}</td></tr>"
        for name, own in counts["speakers"].items()
    )
    if not rows:
        return ""
    return (
        "<h2>Speakers</h2><table><thead><tr><th>speaker</th><th class='num'>segments</th><th class='num'>minutes</th>"
        f"<th>reference, the cleanest of 3-10 s</th></tr></thead><tbody>{rows}</tbody></table>"
    )


def _reasons(counts: Mapping[str, Any]) -> str:
    if not counts["reasons"]:
        return "<h2>Rejected</h2><p>Nothing was rejected.</p>"
    most = max(counts["reasons"].values())
    rows = "".join(
        f"<tr><td class='reason'>{escape(reason)}</td><td class='note'>{MEANINGS.get(reason, '')}</td>"
        f"<td class='num'>{number:,}</td>"
        f"<td style='width:40%'><div class='bar' style='width:{100 * number / most:.0f}%'></div></td></tr>"
        for reason, number in counts["reasons"].items()
    )
    return f"<h2>Rejected, by reason</h2><table><tbody>{rows}</tbody></table>"


def _players(kept: Sequence[Row], folder: Path) -> str:
    """The reference, and others evenly spread over each speaker's segments."""
    by_speaker: dict[str, list[Row]] = defaultdict(list)
    for row in kept:
        by_speaker[row["speaker"]].append(row)
    sections = []
    for speaker, own in by_speaker.items():
        number = min(NUM_PLAYERS, len(own))
        chosen = [own[round(k * (len(own) - 1) / max(1, number - 1))] for k in range(number)]
        chosen[0] = next((row for row in own if row["audio"] == row["ref_audio"]), chosen[0])
        boxes = "".join(
            f"<div><p>{_reference_tag(row)}{escape(row['text'])}<br>"
            f"<span class='note'>{escape(Path(row['audio']).stem)}"
            f" · {row['duration_s']:.1f} s · {row['snr_db']:.0f} dB above the background</span></p>"
            f"{_audio(row['audio'], folder)}</div>"
            for row in chosen
        )
        heading = f"{escape(speaker)}: {number} of {len(own):,} segments"
        sections.append(f"<h2>{heading}</h2><div class='players'>{boxes}</div>")
    return "\n".join(sections)


def _reference_tag(row: Row) -> str:
    return "<span class='tag'>reference</span> " if row["audio"] == row["ref_audio"] else ""


def _rejects(rejected: Sequence[Row], folder: Path, input_dir: str) -> str:
    if not rejected:
        return ""
    # Some of every reason, before more of one.
    by_reason: dict[str, list[Row]] = defaultdict(list)
    for row in rejected:
        by_reason[row["reason"]].append(row)
    share = max(1, MAX_REJECTS // len(by_reason))
    shown = [row for reason in sorted(by_reason) for row in by_reason[reason][:share]]
    rows = "".join(
        f"<tr><td class='reason'>{escape(row['reason'])}</td><td class='where'>{_where(row, input_dir)}</td>"
        f"<td>{escape(_capital(row['detail']))}{_said(row)}</td>"
        f"<td>{_audio(row['audio'], folder) if row.get('audio') else ''}</td></tr>"
        for row in shown
    )
    more = f" ({len(shown)} of {len(rejected):,}; rejected.jsonl has all)" if len(shown) < len(rejected) else ""
    return (
        f"<h2>What was rejected{more}</h2><table><thead><tr><th>reason</th><th>where</th><th>detail</th><th></th></tr>"
        f"</thead><tbody>{rows}</tbody></table>"
    )


def _where(row: Row, input_dir: str) -> str:
    source = Path(row["source"])
    name = source.relative_to(input_dir).as_posix() if source.is_relative_to(input_dir) else source.name
    when = "" if row["start_s"] is None else f"<br><span class='note'>{row['start_s']:.1f}-{row['end_s']:.1f} s</span>"
    return escape(name) + when


def _said(row: Row) -> str:
    return f"<br><span class='note'>{escape(row['text'])}</span>" if row.get("text") else ""


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _audio(path: str, folder: Path) -> str:
    inside = os.path.relpath(path, folder.resolve())
    return f'<audio controls preload="metadata" src="{escape(quote(Path(inside).as_posix()))}"></audio>'
