"""The search's memory."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from keepstep.errors import RunFolderError
from keepstep.tune.journal import FAILED, STOPPED, UNFINISHED, Journal, Record, follow


def test_records_follow_the_journal(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "results.jsonl")
    journal.write("report", 0, step=4, value=0.5, order=0)
    journal.write("report", 1, step=4, value=math.nan, order=0)
    journal.write("report", 0, step=8, value=0.75, order=0)
    journal.write("end", 1, status=FAILED, reason="SIGKILL", step=5)
    journal.write("report", 7, step=8, value=0.75, order=0)
    records = {number: Record(number, {"lr": 0.1}) for number in (0, 1, 2)}
    follow(records, journal.entries(), journal.path)
    assert records[0].reports == [(4, 0.5), (8, 0.75)] and records[0].status == UNFINISHED
    assert records[0].last_step == 8 and not records[0].is_over
    assert records[1].is_over and records[1].reason == "SIGKILL" and math.isnan(records[1].value or 0)
    assert records[2].value is None and not records[2].is_over


def test_a_trial_that_was_stopped_by_hand_is_not_over() -> None:
    record = Record(0, {})
    record.take({"kind": "end", "status": STOPPED, "reason": "", "step": 3})
    assert not record.is_over


def test_a_copys_reports_count_from_the_copy_on() -> None:
    record = Record(0, {"lr": 0.1})
    record.take({"kind": "report", "step": 8, "value": 1.0, "order": 0})
    record.take({"kind": "copy", "order": 3, "donor": 1, "values_before": {"lr": 0.5}, "values": {"lr": 0.4}})
    assert record.values == {"lr": 0.4} and record.last_step == 0
    record.take({"kind": "report", "step": 6, "value": 1.0, "order": 3})
    assert record.last_step == 6


def test_a_line_cut_short_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text('{"kind": "report", "trial": 0, "st')
    Journal(path).write("report", 0, step=4, value=0.5, order=0)
    records = {0: Record(0, {})}
    follow(records, Journal(path).entries(), path)
    assert records[0].reports == [(4, 0.5)]


def test_a_line_of_somebody_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text('{"kind": "report", "trial": 0}\n')
    with pytest.raises(RunFolderError, match="a line that keepstep did not write"):
        follow({0: Record(0, {})}, Journal(path).entries(), path)
