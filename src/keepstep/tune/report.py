"""What a search has found: a table, best first, and tune.json."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from keepstep.checkpoint.store import write_durably
from keepstep.observe.console import printable
from keepstep.standard_json import to_json
from keepstep.tune.journal import FAILED, Record
from keepstep.tune.search import Search


def best_first(search: Search, records: Iterable[Record]) -> list[Record]:
    """By the metric's last value; trials that failed, diverged or have not reported come last."""

    def place(record: Record) -> tuple[bool, bool, float, int]:
        value, has_failed = record.value, record.status == FAILED
        if value is None or math.isnan(value):
            return has_failed, True, 0.0, record.number
        return has_failed, False, -value if search.higher_is_better else value, record.number

    return sorted(records, key=place)


def best_of(search: Search, records: Iterable[Record]) -> Record | None:
    first = best_first(search, records)[0]
    has_value = first.value is not None and not math.isnan(first.value) and first.status != FAILED
    return first if has_value else None


def rows(search: Search, records: Iterable[Record]) -> list[dict[str, Any]]:
    return [
        {
            "run": search.run_name(record.number),
            "status": record.status,
            "values": record.values,
            search.metric: record.value,
            "step": record.step,
            "reports": record.reports,
            **({"copy_of": search.run_name(record.copy.donor)} if record.copy else {}),
            **({"reason": record.reason} if record.reason else {}),
        }
        for record in best_first(search, records)
    ]


def write_summary(path: Path, search: Search, records: dict[int, Record]) -> None:
    best = best_of(search, records.values())
    summary = {
        "search": search.described(),
        "best": None if best is None else search.run_name(best.number),
        "best_command": None if best is None else search.best_command(best.values),
        "trials": rows(search, records.values()),
    }
    write_durably(path, to_json(summary, indent=1))


def print_table(search: Search, records: dict[int, Record]) -> None:
    names = [domain.name for domain in search.space]
    table = Table("run", *names, search.metric, "step", "status", box=None, pad_edge=False)
    for record in best_first(search, records.values()):
        value = "" if record.value is None else f"{record.value:.4g}"
        status = f"{record.status}: {record.reason}" if record.reason else record.status
        values = [record.values[name] for name in names]
        table.add_row(*map(printable, (search.run_name(record.number), *values, value, record.step, status)))
    Console(markup=False, emoji=False, highlight=False).print(table)
