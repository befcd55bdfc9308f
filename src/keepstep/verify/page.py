"""The certificate as one HTML page that needs nothing else: to be read, sent and printed."""

from __future__ import annotations

from html import escape
from typing import Any

_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1c2430; background: #fff; max-width: 52rem; margin: 2.5rem auto;
       padding: 0 1.25rem; }
h1 { font-size: 1.1rem; font-weight: 600; color: #55606e; margin: 0 0 .75rem; }
h2 { font-size: 1rem; margin: 2rem 0 .5rem; }
.verdict { border-left: 6px solid; padding: .75rem 1rem; font-size: 1.15rem; background: #f6f8fa; }
.good { border-color: #1a7f4b; } .bad { border-color: #b42318; }
.verdict strong { display: block; font-size: 1.5rem; }
.good strong, td.good { color: #1a7f4b; } .bad strong, td.bad { color: #b42318; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .3rem .6rem .3rem 0; border-bottom: 1px solid #e3e7ec; vertical-align: top; }
th { font-weight: 600; color: #55606e; font-size: .85rem; }
td.number, th.number { text-align: right; }
table.facts th { width: 11rem; font-size: inherit; }
code { font: .9em ui-monospace, monospace; overflow-wrap: anywhere; }
footer { margin-top: 2rem; color: #55606e; font-size: .85rem; }
@media print { body { margin: 0; max-width: none; font-size: 11pt; } .verdict { background: none; }
               h2 { break-after: avoid; } tr { break-inside: avoid; } }
"""


def page(certificate: dict[str, Any]) -> str:
    """The whole page."""
    good = certificate["certified"]
    head, _, rest = certificate["verdict"].partition(": ")
    parts = [
        f"<h1>keepstep verify: {escape(certificate['script'])}</h1>",
        f'<div class="verdict {"good" if good else "bad"}"><strong>{escape(_capital(head))}</strong>'
        f"{escape(_capital(rest))}.</div>",
        _cause(certificate["cause"]),
        _list("What stood in the way", certificate["problems"]),
        _faults(certificate["faults"]),
        _comparisons(certificate["comparisons"]),
        _changed_workers(certificate["changed_workers"]),
        _facts(certificate),
        _list("Notes", certificate["notes"]),
        f"<footer>Made {certificate['made']} by keepstep {escape(certificate['versions']['keepstep'])} in "
        f"{certificate['seconds']} s. Every hash is that of the bits: equal means equal to the last one.</footer>",
    ]
    title = f"{_capital(head)}: {certificate['script']}"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head>\n<body>\n" + "\n".join(filter(None, parts)) + "\n</body></html>\n"
    )


def _cause(cause: dict[str, Any] | None) -> str:
    if cause is None:
        return ""
    places = "".join(f"<li><code>{escape(place)}</code></li>" for place in cause["places"])
    return (
        f"<h2>The likely cause</h2><p>{escape(_capital(cause['text']))}.</p>"
        f"{f'<ul>{places}</ul>' if places else ''}<p><b>What to do:</b> {escape(cause['advice'])}.</p>"
    )


def _faults(faults: list[dict[str, Any]]) -> str:
    rows = [
        (
            fault["what"],
            ", ".join(map(str, fault["ranks"])) or "all",
            fault["step"],
            fault["phase"],
            _or_nothing(fault["steps_lost"]),
            _or_nothing(fault["recovered_s"]),
        )
        for fault in faults
    ]
    return "<h2>What was done to it</h2>" + _table(
        ("fault", "rank", "after step", "phase", "steps lost", "seconds to recover"), rows, {2, 4, 5}
    )


def _comparisons(comparisons: list[dict[str, Any]]) -> str:
    parts = ["<h2>What was compared with the undisturbed run</h2>"]
    for found in comparisons:
        different = found["differences"]
        rows = [
            (kind, f"{count:,}", _first(different[kind]) if kind in different else "bitwise equal")
            for kind, count in found["values"].items()
        ]
        rows += [(kind, "", _first(first)) for kind, first in different.items() if kind not in found["values"]]
        parts.append(
            f"<p>Run {escape(found['run'])}: {found['steps']} steps on every worker, {found['replayed']} of them made "
            "again after a restart.</p>"
        )
        parts.append(_table(("of every step", "values", "result"), rows, {1}))
    return "".join(parts)


def _first(first: dict[str, Any]) -> str:
    who = f", rank {first['rank']}" if first["rank"] is not None else ""
    return f"differs, first at step {first['step']}: {first['name']}{who}"


def _changed_workers(found: dict[str, Any]) -> str:
    title = "<h2>Another number of workers</h2>"
    if not found["done"]:
        return f"{title}<p>Not tried: {escape(found['why'] or 'the run had failed before')}.</p>"
    if not found["same_samples"]:
        samples = f"step {found['first_other_sample']} saw other samples"
    elif found["compared_by"] == "nothing":
        samples = "samples cannot be told apart in its batches, so they were not compared"
    else:
        samples = f"the same samples in every step, by their {found['compared_by']}"
    largest = found["largest"]
    near = "no metric differs" if not largest else f"the largest difference is {largest:.1e}, of '{found['metric']}'"
    why = f"; by nature: {found['depends_on_split']}" if found["depends_on_split"] else ""
    return (
        f"{title}<p>Stopped at step {found['at_step']} with {found['workers_before']}, on with {found['workers']} "
        f"for {found['steps']} steps: {escape(samples)}; relative to a metric's largest value {escape(near)} "
        f"(allowed: {found['tolerance']:g}{escape(why)}).</p>"
    )


def _facts(certificate: dict[str, Any]) -> str:
    settings, versions = certificate["settings"], certificate["versions"]
    facts = {
        "script": " ".join([certificate["script"], *certificate["arguments"]]),
        "sha256": certificate["script_sha256"] or "",
        "strategy": settings["strategy"],
        "workers": settings["workers"],
        "engine": settings["engine"],
        "device": f"{settings['device']}, {settings['precision']}",
        "steps": f"{certificate['steps']}, saved every {certificate['checkpoint_every']}",
        "seed of the faults": certificate["seed_of_faults"],
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
    }
    rows = "".join(
        f"<tr><th>{name}</th><td><code>{escape(str(value))}</code></td></tr>" for name, value in facts.items()
    )
    return f'<h2>What ran</h2><table class="facts">{rows}</table>'


def _table(head: tuple[str, ...], rows: list[tuple[Any, ...]], numbers: set[int]) -> str:
    def line(cells: tuple[Any, ...], tag: str) -> str:
        shown = (
            f"<{tag}{' class=number' if place in numbers else ''}>{escape(str(cell))}</{tag}>"
            for place, cell in enumerate(cells)
        )
        return f"<tr>{''.join(shown)}</tr>"

    return f"<table>{line(head, 'th')}{''.join(line(row, 'td') for row in rows)}</table>"


def _list(title: str, lines: list[str]) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<h2>{title}</h2><ul>{items}</ul>" if lines else ""


def _or_nothing(value: Any) -> Any:
    return "" if value is None else value


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
