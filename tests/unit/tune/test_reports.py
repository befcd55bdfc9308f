"""The reports of a run."""

from __future__ import annotations

import math
from pathlib import Path

from keepstep.tune.reports import Reports


def all_of(reports: Reports) -> list[tuple[int, float]]:
    return list(iter(reports.next, None))


def test_lines_with_the_metric_are_reports(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    reports = Reports(path, "accuracy", 0)
    assert reports.next() is None
    path.write_text(
        '{"step": 4, "loss": 1.0}\n{"step": 4, "accuracy": 0.5}\n{"step": 5, "loss": 1.0}\n{"step": 8, "acc'
    )
    assert all_of(reports) == [(4, 0.5)] and reports.step == 5
    with path.open("a") as file:
        file.write('uracy": "nan"}\n')
    (step, value), *rest = all_of(reports)
    assert step == 8 and math.isnan(value) and not rest


def test_what_was_reported_is_not_reported_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [f'{{"step": {step}, "accuracy": {step / 10}}}\n' for step in (4, 8, 12)]
    path.write_text("".join(lines[:2]))
    reports = Reports(path, "accuracy", 4)
    assert all_of(reports) == [(8, 0.8)]
    path.write_text(lines[0])  # the run went back to its checkpoint
    assert all_of(reports) == []
    path.write_text("".join(lines))
    assert all_of(reports) == [(12, 1.2)]
