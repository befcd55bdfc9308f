"""tune.png: the metric over the steps of every trial, and against each parameter."""

from __future__ import annotations

import importlib.util
import math
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from keepstep.tune.domain import Domain
from keepstep.tune.journal import FAILED, FINISHED, Record
from keepstep.tune.report import best_of
from keepstep.tune.search import Search

_BEST, _DONE, _STOPPED, _FAILED = "#d95f02", "#3b75af", "#a9b4bf", "#c1272d"
_COLUMNS = 3


def write_plot(path: Path, search: Search, records: Iterable[Record]) -> bool:
    """False where matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        return False
    from matplotlib.figure import Figure

    reported = [record for record in records if record.value is not None]
    num_panels = 1 + len(search.space)
    columns = min(num_panels, _COLUMNS)
    num_rows = math.ceil(num_panels / columns)
    figure = Figure(figsize=(4.6 * columns, 3.6 * num_rows), layout="constrained", dpi=120)
    panels = list(figure.subplots(num_rows, columns, squeeze=False).flat)
    for panel in panels[num_panels:]:
        panel.remove()
    for panel in panels[:num_panels]:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(color="#eeeeee", zorder=0)
    best = best_of(search, reported) if reported else None
    _draw_curves(panels[0], search, reported, best)
    for panel, domain in zip(panels[1:], search.space, strict=False):
        _draw_parameter(panel, search, domain, reported, best)
    figure.suptitle(textwrap.fill(_title(search, reported, best), 45 * columns), fontsize=11)
    figure.savefig(path, metadata={"Software": "keepstep"})
    return True


def _title(search: Search, reported: list[Record], best: Record | None) -> str:
    if best is None:
        return f"{search.name}: no trial has reported {search.metric}"
    values = ", ".join(f"{name} {value}" for name, value in best.values.items())
    best_value = f"{search.metric} {best.value:.4g}"
    return f"{search.name}: {len(reported)} trials, best {best_value} with {values} ({search.run_name(best.number)})"


def _color(record: Record, best: Record | None) -> str:
    if record is best:
        return _BEST
    return {FINISHED: _DONE, FAILED: _FAILED}.get(record.status, _STOPPED)


def _draw_curves(panel: Any, search: Search, records: list[Record], best: Record | None) -> None:
    for record in records:
        steps, values = zip(*record.reports, strict=True)
        on_top = record is best
        style = {"linewidth": 2.0 if on_top else 1.2, "zorder": 4 if on_top else 3, "markersize": 3.5}
        panel.plot(steps, values, color=_color(record, best), marker="o", **style)
    panel.set_xlabel("step")
    panel.set_ylabel(search.metric)
    _draw_legend(panel, records, best)


def _draw_legend(panel: Any, records: list[Record], best: Record | None) -> None:
    from matplotlib.lines import Line2D

    labels = {_BEST: "best", _DONE: "finished", _STOPPED: "stopped", _FAILED: "failed"}
    used = {_color(record, best) for record in records}
    shown = [(color, label) for color, label in labels.items() if color in used]
    handles = [Line2D([], [], color=color, marker="o", markersize=4, label=label) for color, label in shown]
    if handles:
        panel.legend(handles=handles, frameon=False, fontsize=8)


def _draw_parameter(panel: Any, search: Search, domain: Domain, records: list[Record], best: Record | None) -> None:
    for record in records:
        value = record.values[domain.name]
        place = domain.arguments.index(value) if domain.is_list else value
        marker = {"marker": "x"} if record.status == FAILED else {"marker": "o", "edgecolors": "white"}
        on_top = 4 if record is best else 3
        panel.scatter([place], [record.value], color=_color(record, best), s=46, zorder=on_top, **marker)
    if domain.is_list:
        panel.set_xticks(range(len(domain.arguments)), [str(value) for value in domain.arguments])
        panel.set_xlim(-0.5, len(domain.arguments) - 0.5)
    else:
        low, high = (float(bound) for bound in domain.arguments[:2])
        if domain.is_logarithmic:
            panel.set_xscale("log")
        margin = (high / low) ** 0.04 if domain.is_logarithmic else 0.04 * (high - low)
        panel.set_xlim(*((low / margin, high * margin) if domain.is_logarithmic else (low - margin, high + margin)))
    panel.set_xlabel(domain.name)
    panel.set_ylabel(search.metric)
