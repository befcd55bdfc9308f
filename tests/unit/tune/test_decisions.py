"""Who is stopped early, before and after a resume; who is best."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from keepstep.job import Target
from keepstep.tune.journal import FAILED, FINISHED, STOPPED_EARLY, Journal, Record
from keepstep.tune.order import KEY, Order, Place
from keepstep.tune.report import best_first, best_of
from keepstep.tune.search import Options, Search


def search(metric: str = "acc:max") -> Search:
    return Search.of({}, Target("train.py"), Options(("lr=uniform(0,1)",), metric), "find")


def reports(*values: tuple[int, float]) -> list[dict[str, Any]]:
    return [{"kind": "report", "trial": number, "value": value, "step": 1, "order": 0} for number, value in values]


@pytest.mark.parametrize(("metric", "sign"), [("acc:max", 1.0), ("loss:min", -1.0)])
def test_asha_stops_the_worse_and_decides_the_same_when_it_is_told_again(metric: str, sign: float) -> None:
    schedulers = pytest.importorskip("keepstep.tune.schedulers")
    told = reports((0, 0.9 * sign), (1, 0.1 * sign), (2, 0.95 * sign), (0, 0.91 * sign), (2, 0.5 * sign))
    assert schedulers.replay(schedulers.make_asha(search(metric)), told) == {1}
    resumed = schedulers.make_asha(search(metric))
    assert schedulers.replay(resumed, told[:3]) == {1}
    # Trial 0 passed its first rung; it is not judged there again, though trial 2 was better since.
    assert schedulers.replay(resumed, reports((0, 0.91 * sign))) == set()


def test_pbt_writes_a_copy_down_before_it_is_made(tmp_path: Path) -> None:
    schedulers = pytest.importorskip("keepstep.tune.schedulers")
    records = {number: Record(number, {"lr": 0.1 * (1 + number)}) for number in (0, 1)}
    journal, place = Journal(tmp_path / "results.jsonl"), Place("/runs", Target("train.py"), None, "board")
    pbt = schedulers.Pbt(search(), records, journal, place, take_turns=False)
    loser, donor = (SimpleNamespace(config={KEY: {"number": number}}) for number in (0, 1))
    for order in (1, 2):
        config = pbt.copy_of(loser, donor)
        told = Order.of(config)
        assert told.number == 0 and told.copy is not None
        assert (told.copy.order, told.copy.donor, told.copy.before) == (order, "find-0001", {"lr": 0.2})
        assert told.values == told.copy.after == records[0].values != {"lr": 0.2}
        assert told.words[-2:] == ["--lr", str(told.values["lr"])]
    resumed = Record(0, {"lr": 0.1})
    for entry in journal.entries():
        resumed.take(entry)
    assert resumed == records[0]
    assert config[KEY] != loser.config[KEY] and donor.config == {KEY: {"number": 1}}


def record(number: int, value: float | None, status: str = FINISHED) -> Record:
    return Record(number, {"lr": 0.1}, [(1, value)] if value is not None else [], status=status)


def test_the_best_comes_first_and_what_failed_last() -> None:
    found = [record(0, 0.5), record(1, 0.9, FAILED), record(2, None, FAILED), record(3, math.nan), record(4, 0.7)]
    assert [each.number for each in best_first(search(), found)] == [4, 0, 3, 1, 2]
    assert [each.number for each in best_first(search("loss:min"), found)] == [0, 4, 3, 1, 2]


def test_there_may_be_no_best() -> None:
    assert best_of(search(), [record(0, None, FAILED), record(1, math.nan), record(2, 0.5, FAILED)]) is None
    best = best_of(search(), [record(0, 0.4, STOPPED_EARLY), record(1, 0.3)])
    assert best is not None and best.number == 0
