"""The evaluation as one page to look at and to listen to: python page.py voice/evaluation."""

from __future__ import annotations

import argparse
import base64
import io
import json
import os
import sys
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import numpy.typing as npt
from audio import SAMPLE_RATE_HZ, AudioError, load_audio
from evaluation_folder import PAGE, RESULTS, SYNTHETIC, SYSTEMS
from verdict import LABELS, METRICS

from keepstep.data.fetch import whole_file

NUM_MELS = 80
HOP = 480
"""Samples: 50 columns a second keep a picture at some kilobytes a second."""
RANGE_DB = 80.0
COLOURS = {"base": "#b45309", "fine_tuned": "#1d4ed8", "real": "#3f7d58"}

Mel = npt.NDArray[np.float64]

_STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1c2430; background: #fff; max-width: 1200px; margin: 2rem auto;
       padding: 0 1.5rem; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2.25rem 0 .6rem; }
.from { color: #55606e; margin: .15rem 0 1.25rem; } .from code { font: .9em ui-monospace, monospace; }
.verdict { border-left: 5px solid #1d4ed8; background: #f5f7fb; padding: .7rem 1.1rem; margin: 0; list-style: none; }
.verdict li { margin: .2rem 0; } .verdict li:first-child { font-size: 1.1rem; font-weight: 600; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .35rem .8rem .35rem 0; border-bottom: 1px solid #e3e7ec; vertical-align: top; }
thead th { color: #55606e; font-size: .85rem; font-weight: 600; } tbody th { font-weight: 600; width: 25rem; }
.note { color: #66707d; font-size: .85rem; font-weight: 400; } td b { font-size: 1.05rem; font-weight: 600; }
.chart { display: block; width: 100%; height: auto; } .chart text { font: 12px system-ui, sans-serif; fill: #55606e; }
.text { border-top: 1px solid #d5dae1; padding: 1rem 0 1.2rem; break-inside: avoid; }
.text h3 { font-size: 1.02rem; font-weight: 600; margin: 0 0 .6rem; }
.text h3 span { color: #8a93a0; margin-right: .6rem; }
.three { display: grid; grid-template-columns: repeat(3, minmax(0, 1fr)); gap: 1.1rem; }
.who { font-size: .85rem; font-weight: 600; margin-bottom: .25rem; }
audio { width: 100%; height: 34px; display: block; margin-bottom: .4rem; }
.mel { height: 92px; background: #f1f2f5; border-radius: 3px; overflow: hidden; }
.mel img { height: 100%; display: block; image-rendering: auto; }
.figures { display: flex; justify-content: space-between; margin: .2rem 0; font-variant-numeric: tabular-nums; }
.figures div { line-height: 1.25; } .figures .note { font-size: .78rem; }
.heard { font-size: .92rem; margin: .15rem 0 0; color: #3a4450; }
.heard s { color: #8a93a0; } .heard mark { background: #fde2df; color: #a11b12; border-radius: 2px; padding: 0 .15em; }
.heard ins { background: #fff0c9; color: #7a4b00; text-decoration: none; border-radius: 2px; padding: 0 .15em; }
.missing { color: #b42318; font-size: .85rem; margin: .15rem 0; }
footer { margin: 2rem 0 1rem; color: #66707d; font-size: .85rem; }
@media (max-width: 720px) { .three { grid-template-columns: 1fr; } tbody th { width: auto; } }
"""


def write_page(folder: Path, results: Mapping[str, Any]) -> Path:
    mels = _mels(folder, results["files"])
    parts = [
        _head(results),
        '<ul class="verdict">'
        + "".join(f"<li>{escape(_capital(line))}.</li>" for line in results["verdict"])
        + "</ul>",
        _scores(results),
        _voices(results),
        _texts(folder, results, mels),
        _footer(results),
    ]
    title = escape(f"Voice of {results['speaker']}: base against fine-tuned")
    content = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head>\n<body>\n" + "\n".join(filter(None, parts)) + "\n</body></html>\n"
    )
    with whole_file(folder / PAGE) as file:
        file.write(content.encode())
    return folder / PAGE


def _head(results: Mapping[str, Any]) -> str:
    made = results["generation"]
    facts = [f"{len(results['files'])} text{'s' * (len(results['files']) != 1)}"]
    for name, label in (("base_model", "base"), ("voice", "fine-tuned"), ("clone_mode", "cloned by"), ("seed", "seed")):
        if name in made:
            facts.append(f"{label} <code>{escape(str(made[name]))}</code>")
    return f"<h1>Voice of {escape(results['speaker'])}</h1>\n<p class='from'>{' &middot; '.join(facts)}</p>"


# ---- figures of all texts


def _scores(results: Mapping[str, Any]) -> str:
    rows = []
    for metric in METRICS:
        summaries = [results["systems"][system].get(metric.key) for system in SYSTEMS]
        if any(summaries):
            paired = results["differences"].get(metric.key)
            arrow = {"higher": "higher is better", "lower": "lower is better", None: ""}[metric.better]
            note = "; ".join(filter(None, [metric.help, arrow]))
            cells = "".join(f"<td>{_cell(found)}</td>" for found in summaries)
            difference = _cell(paired, "+") if paired else ""
            rows.append(
                f"<tr><th>{metric.label}<br><span class='note'>{note}</span></th>{cells}<td>{difference}</td></tr>"
            )
    rows.append(_rank_row(results))
    heads = "".join(
        f"<th style='color:{COLOURS[system]}'>{LABELS[system]}"
        f" <span class='note'>n = {results['systems'][system]['num_files']}</span></th>"
        for system in SYSTEMS
    )
    return (
        f"<h2>Scores</h2><table><thead><tr><th></th>{heads}<th>fine-tuned less base, text by text</th></tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table><p class='note'>Means with 95% bootstrap intervals over recordings.</p>"
    )


def _cell(summary: Mapping[str, Any] | None, sign: str = "") -> str:
    if summary is None:
        return "&ndash;"
    interval = f"{summary['low']:{sign}.2f} to {summary['high']:{sign}.2f}" if summary["low"] is not None else "n = 1"
    return f"<b>{summary['mean']:{sign}.2f}</b> <span class='note'>{interval}</span>".replace("-", "&minus;")


def _rank_row(results: Mapping[str, Any]) -> str:
    found = [results["systems"][system] for system in SYSTEMS]
    if len(results["compared_with"]) < 2 or not any(one.get("rank") for one in found):
        return ""
    cells = "".join(
        f"<td><b>{one['rank']}</b> <span class='note'>first in {one['first']} of {one['similarity']['n']}</span></td>"
        if one.get("rank")
        else "<td>&ndash;</td>"
        for one in found
    )
    note = f"of {escape(results['speaker'])} among {len(results['compared_with'])} speakers, by similarity"
    return f"<tr><th>rank<br><span class='note'>{note}</span></th>{cells}<td></td></tr>"


def _axis(results: Mapping[str, Any]) -> tuple[float, float]:
    """The similarities that charts span: all there are, and 1."""
    bands = [found["from"] for found in results["bands"].values() if found]
    values = [file[system]["similarity"] for file in results["files"] for system in SYSTEMS if _has(file, system)]
    return max(0.0, float(np.floor(10 * min([*values, *bands], default=0.0)) / 10)), 1.0


def _has(file: Mapping[str, Any], system: str) -> bool:
    return "similarity" in file.get(system, {})


def _voices(results: Mapping[str, Any]) -> str:
    """Each recording's similarity as a dot, over the bands."""
    shown = [system for system in SYSTEMS if results["systems"][system].get("similarity")]
    if not shown:
        return ""
    left, width, top, step = 90, 1150, 30, 36
    low, high = _axis(results)
    height = top + step * len(shown) + 26

    def x(value: float) -> float:
        return left + (value - low) / (high - low) * (width - left - 12)

    names = {"different_speakers": "other speakers", "same_speaker": f"{results['speaker']}'s own recordings"}
    parts = [_band(x, found, top, step * len(shown), kind) for kind, found in results["bands"].items() if found]
    for kind, found in results["bands"].items():
        if found:
            middle = x((found["from"] + found["to"]) / 2)
            parts.append(f"<text x='{middle:.1f}' y='20' text-anchor='middle'>{escape(names[kind])}</text>")
    for number, system in enumerate(shown):
        y = top + step * (number + 0.5)
        summary, colour = results["systems"][system]["similarity"], COLOURS[system]
        parts.append(f"<text x='0' y='{y + 4}' style='fill:{colour};font-weight:600'>{LABELS[system]}</text>")
        for file in results["files"]:
            if _has(file, system):
                at = x(file[system]["similarity"])
                title = f"{file['id']}: {file[system]['similarity']:.2f}"
                parts.append(
                    f"<circle cx='{at:.1f}' cy='{y}' r='5' fill='{colour}' fill-opacity='.35'>"
                    f"<title>{escape(title)}</title></circle>"
                )
        if summary["low"] is not None:
            ends = f"x1='{x(summary['low']):.1f}' x2='{x(summary['high']):.1f}'"
            parts.append(f"<line {ends} y1='{y}' y2='{y}' stroke='{colour}' stroke-width='3'/>")
        at = x(summary["mean"])
        parts.append(
            f"<line x1='{at:.1f}' x2='{at:.1f}' y1='{y - 10}' y2='{y + 10}' stroke='{colour}' stroke-width='3'/>"
        )
    for tick in np.arange(low, high + 0.01, 0.1):
        parts.append(f"<text x='{x(tick):.1f}' y='{height - 6}' text-anchor='middle'>{tick:.1f}</text>")
    return (
        "<h2>Whose voice it is</h2><p class='note'>Similarity of every recording to the mean of real ones; a tick is "
        "the mean, a line its interval; shaded: where nine in ten real recordings lie.</p>"
        f"<svg class='chart' viewBox='0 0 {width} {height}' role='img'>{''.join(parts)}</svg>"
    )


def _band(x: Any, found: Mapping[str, Any], y: float, height: float, kind: str) -> str:
    colour = "#c9e6cf" if kind == "same_speaker" else "#dfe2e8"
    start, end = x(found["from"]), x(found["to"])
    return f"<rect x='{start:.1f}' y='{y}' width='{end - start:.1f}' height='{height}' fill='{colour}'/>"


# ---- one text


def _texts(folder: Path, results: Mapping[str, Any], mels: Mapping[str, Mel]) -> str:
    loudest = max((float(mel.max()) for mel in mels.values()), default=0.0)
    legend = (
        "<p class='note'>Below each player: the mel spectrogram (0 to 12 kHz, the same decibels and seconds for all of "
        "a text), the similarity over the bands, and what the ASR model heard: <span class='heard'>"
        "<mark>another word</mark>, <s>a word not heard</s>, <ins>a word too many</ins>.</span></p>"
    )
    cards = [_card(folder, results, file, mels, loudest) for file in results["files"]]
    return f"<h2>Texts</h2>{legend}{''.join(cards)}"


def _card(
    folder: Path, results: Mapping[str, Any], file: Mapping[str, Any], mels: Mapping[str, Mel], loudest: float
) -> str:
    longest = max((mels[own["audio"]].shape[1] for own in _recordings(file) if own["audio"] in mels), default=1)
    columns = []
    for system in SYSTEMS:
        own = file.get(system)
        head = f"<div class='who' style='color:{COLOURS[system]}'>{LABELS[system]}</div>"
        if own is None:
            columns.append(f"<div>{head}<p class='note'>no recording</p></div>")
            continue
        mel = mels.get(own["audio"])
        columns.append(
            f"<div>{head}<audio controls preload='metadata' src='{_link(folder, own['audio'])}'></audio>"
            + (_picture(mel, longest, loudest) if mel is not None else "")
            + _bar(results, own, COLOURS[system])
            + _figures(own)
            + _heard(own)
            + "".join(f"<p class='missing'>{escape(f'{name}: {why}')}</p>" for name, why in own["missing"].items())
            + "</div>"
        )
    title = f"<h3><span>{escape(str(file['id']))}</span>{escape(file['text'])}</h3>"
    return f"<section class='text'>{title}<div class='three'>{''.join(columns)}</div></section>"


def _recordings(file: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [file[system] for system in SYSTEMS if system in file]


def _link(folder: Path, audio: str) -> str:
    return quote(os.path.relpath(folder.resolve() / audio, folder.resolve()))


def _bar(results: Mapping[str, Any], own: Mapping[str, Any], colour: str) -> str:
    """A point on the scale of similarity, over the bands: the scale does not begin at 0, so a length would mislead."""
    if "similarity" not in own:
        return ""
    low, high = _axis(results)

    def x(value: float) -> float:
        return 26 + (value - low) / (high - low) * 308

    bands = "".join(_band(x, found, 3, 12, kind) for kind, found in results["bands"].items() if found)
    at = x(own["similarity"])
    return (
        "<svg class='chart' viewBox='0 0 360 18' role='img' style='margin-top:.4rem'>"
        f"<title>similarity {own['similarity']:.2f}</title><text x='0' y='13'>{low:.1f}</text>"
        f"<text x='360' y='13' text-anchor='end'>{high:.1f}</text>{bands}"
        f"<line x1='26' x2='334' y1='9' y2='9' stroke='#c3c9d2'/>"
        f"<line x1='26' x2='{at:.1f}' y1='9' y2='9' stroke='{colour}' stroke-width='3'/>"
        f"<circle cx='{at:.1f}' cy='9' r='5.5' fill='{colour}'/></svg>"
    )


def _figures(own: Mapping[str, Any]) -> str:
    shown = [
        (label, f"{own[key]:.2f}")
        for key, label in (("similarity", "similarity"), ("wer", "WER"), ("dnsmos", "DNSMOS"))
        if key in own
    ]
    if "duration_s" in own:
        ratio = f" <span class='note'>&times; {own['duration_ratio']:.2f}</span>" if "duration_ratio" in own else ""
        shown.append(("duration", f"{own['duration_s']:.1f} s{ratio}"))
    cells = "".join(f"<div><span class='note'>{label}</span><br>{value}</div>" for label, value in shown)
    notes = [f"closest to {own['nearest']}"] if own.get("rank", 1) > 1 else []
    notes += ["did not end by itself: cut"] if own.get("cut") else []
    warning = f"<p class='missing'>{escape('; '.join(notes))}</p>" if notes else ""
    return f"<div class='figures'>{cells}</div>{warning}"


def _heard(own: Mapping[str, Any]) -> str:
    if "marks" not in own:
        return ""
    words = []
    for kind, said, heard in own["marks"]:
        if kind == "equal":
            words.append(escape(heard))
        elif kind == "substitute":
            words.append(f"<mark title='{escape(f'to be said: {said}')}'>{escape(heard)}</mark>")
        else:
            words.append(f"<s>{escape(said)}</s>" if kind == "delete" else f"<ins>{escape(heard)}</ins>")
    return f"<p class='heard'>{' '.join(words)}</p>"


# ---- spectrograms


def _mels(folder: Path, files: Sequence[Mapping[str, Any]]) -> dict[str, Mel]:
    """In decibels, by the recording's path. One that is gone since it was scored gets the reason, as others have it."""
    found = {}
    for own in (own for file in files for own in _recordings(file)):
        try:
            found[own["audio"]] = _mel(load_audio(folder / own["audio"], SAMPLE_RATE_HZ))
        except AudioError as error:
            own["missing"].setdefault("audio", str(error))
    return found


def _mel(wav: npt.NDArray[np.float32]) -> Mel:
    import librosa

    power = librosa.feature.melspectrogram(y=wav, sr=SAMPLE_RATE_HZ, n_fft=1024, hop_length=HOP, n_mels=NUM_MELS)
    return np.asarray(10.0 * np.log10(np.maximum(power, 1e-10)), np.float64)


def _picture(mel: Mel, longest: int, loudest: float) -> str:
    from matplotlib.image import imsave

    png = io.BytesIO()
    imsave(png, mel, cmap="magma", vmin=loudest - RANGE_DB, vmax=loudest, origin="lower", format="png")
    width = 100.0 * mel.shape[1] / longest
    source = f"data:image/png;base64,{base64.b64encode(png.getvalue()).decode()}"
    return f"<div class='mel'><img alt='mel spectrogram' style='width:{width:.1f}%' src='{source}'></div>"


def _footer(results: Mapping[str, Any]) -> str:
    compared = ", ".join(f"{escape(name)} ({count})" for name, count in results["compared_with"].items())
    generated = " and ".join(LABELS[system] for system in SYNTHETIC)
    return (
        f"<footer>Recordings under {generated} are synthetic speech, and say so in their metadata. Compared with real "
        f"recordings of {compared}. Figures of every file: {RESULTS}.</footer>"
    )


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help=f"with {RESULTS}, as evaluate.py wrote it")
    folder = parser.parse_args(argv).folder
    try:
        results = json.loads((folder / RESULTS).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        sys.exit(f"{folder} has no {RESULTS} that can be read ({error}): run evaluate.py first")
    print(write_page(folder, results))


if __name__ == "__main__":
    main()
