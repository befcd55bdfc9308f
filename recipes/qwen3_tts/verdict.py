"""Says in words and in a table what an evaluation has shown, and no more than that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from evaluation_folder import SYNTHETIC, SYSTEMS
from scores import Summary

LABELS = {"base": "base", "fine_tuned": "fine-tuned", "real": "real"}


@dataclass(frozen=True)
class Metric:
    key: str
    label: str
    better: str | None
    """higher, lower, or None where neither is."""
    weight: str | None
    """The field by which recordings are weighted, as an error rate by its words."""
    column: str | None
    """The scorer it comes from."""
    help: str


METRICS = (
    Metric("similarity", "speaker similarity", "higher", None, "similarity", "cosine to the target's mean recording"),
    Metric("wer", "WER", "lower", "num_words", "wer", "share of words that ASR hears wrong"),
    Metric("cer", "CER", "lower", "num_characters", "wer", "the same of characters"),
    Metric("dnsmos", "DNSMOS", "higher", None, "dnsmos", "how clean it sounds, 1 to 5"),
    Metric("duration_ratio", "duration ratio", None, None, None, "to the real recording, or to the speaker's pace"),
    Metric("real_time_factor", "real-time factor", None, "duration_s", None, "seconds taken for one second of speech"),
)


def verdict(results: Mapping[str, Any]) -> list[str]:
    """One statement a line; a difference is claimed only where the intervals do not overlap."""
    lines = [
        *_compared(results, "similarity", f"is closer to {results['speaker']}"),
        *_placed(results),
        *_compared(results, "wer", "is understood better"),
        *_compared(results, "dnsmos", "sounds cleaner"),
        *_cut(results),
    ]
    lines += [f"{column} was left out: {reason}" for column, reason in results["left_out"].items()]
    return lines or ["nothing could be scored"]


def _compared(results: Mapping[str, Any], key: str, claim: str) -> list[str]:
    metric = next(metric for metric in METRICS if metric.key == key)
    base, tuned, real = (_summary(results, system, key) for system in SYSTEMS)
    if base is None or tuned is None:
        return [
            f"{metric.label} of {LABELS[name]}: {only}"
            for name, only in zip(SYNTHETIC, (base, tuned), strict=True)
            if only
        ]
    ceiling = f"; real recordings {real}" if real else ""
    if tuned.overlaps(base):
        paired = results["differences"].get(key)
        shown = paired and paired["low"] is not None and paired["low"] * paired["high"] > 0
        though = f" (though text by text it is {_signed(paired)})" if shown else ""
        figures = f"{metric.label} {tuned} against {base}"
        return [f"no difference shown between fine-tuned and base: {figures}{though}{ceiling}"]
    order = [("fine-tuned", tuned), ("base", base)]
    if (tuned.mean > base.mean) != (metric.better == "higher"):
        order.reverse()
    (winner, better), (loser, worse) = order
    return [f"{winner} {claim} than {loser}: {metric.label} {better} against {worse}{ceiling}"]


def _placed(results: Mapping[str, Any]) -> list[str]:
    """Where the fine-tuned voice lies against the bands, and where the target ranks for both."""
    target, systems = results["speaker"], results["systems"]
    same, different = results["bands"]["same_speaker"], results["bands"]["different_speakers"]
    tuned = _summary(results, "fine_tuned", "similarity")
    lines = []
    if tuned and same:
        where = "below" if tuned.mean < same["from"] else "above" if tuned.mean > same["to"] else "within"
        others = f"; other speakers: {different['from']:.2f} to {different['to']:.2f}" if different else ""
        lines.append(
            f"fine-tuned lies {where} what {target}'s own recordings reach among themselves, "
            f"{same['from']:.2f} to {same['to']:.2f}{others}"
        )
    if different:
        ranks = [
            f"for {LABELS[system]} {target} ranks {_place(found['rank'])} ({found['first']} of "
            f"{found['similarity']['n']} recordings are closest to {target})"
            for system in reversed(SYNTHETIC)
            if (found := systems[system]).get("rank")
        ]
        if ranks:
            lines.append(f"among {len(results['compared_with'])} speakers, {', '.join(ranks)}")
    return lines


def _cut(results: Mapping[str, Any]) -> list[str]:
    return [
        f"{found['cut']} of {found['num_files']} {LABELS[system]} recordings did not end by themselves: cut at "
        "--max-new-tokens"
        for system in SYNTHETIC
        if (found := results["systems"][system])["cut"]
    ]


def table(results: Mapping[str, Any]) -> str:
    """A line a metric, a column a system, and what fine-tuned differs by, text by text."""
    num_texts = max(found["num_files"] for found in results["systems"].values())
    rows = [("", *(LABELS[system] for system in SYSTEMS), "difference")]
    for metric in METRICS:
        cells = [str(found) if (found := _summary(results, system, metric.key)) else "-" for system in SYSTEMS]
        if any(cell != "-" for cell in cells):
            paired = results["differences"].get(metric.key)
            rows.append((metric.label, *cells, _signed(paired) if paired else "-"))
    ranks = [results["systems"][system].get("rank") for system in SYSTEMS]
    if any(ranks) and len(results["compared_with"]) > 1:
        rows.append((f"rank among {len(results['compared_with'])}", *(str(rank or "-") for rank in ranks), "-"))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([f"{results['speaker']}, {num_texts} texts, means with 95% intervals", "", *lines])


def _summary(results: Mapping[str, Any], system: str, key: str) -> Summary | None:
    found = results["systems"][system].get(key)
    return Summary(**found) if found else None


def _signed(paired: Mapping[str, Any]) -> str:
    interval = f" [{paired['low']:+.2f}, {paired['high']:+.2f}]" if paired["low"] is not None else ""
    return f"{paired['mean']:+.2f}{interval}"


def _place(rank: int) -> str:
    words = ("first", "second", "third")
    return words[rank - 1] if rank <= len(words) else f"{rank}th"
