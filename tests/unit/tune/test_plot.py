"""tune.png."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from keepstep.job import Target
from keepstep.tune.journal import FAILED, FINISHED, STOPPED_EARLY, Record
from keepstep.tune.plot import write_plot
from keepstep.tune.search import Options, Search

SPACE = ("lr=loguniform(1e-5,1e-1)", "width=choice(64,128)", "opt=choice(adam,sgd)", "fused=choice(true,false)")


def search() -> Search:
    return Search.of({}, Target("train.py"), Options(SPACE, "accuracy:max", trials=12), "find")


def records() -> list[Record]:
    made = []
    for number in range(12):
        ends = {0: FAILED, 1: FINISHED, 2: FINISHED}
        length = {FAILED: 3, FINISHED: 9, STOPPED_EARLY: 1 + 2 * (number % 2)}[ends.get(number, STOPPED_EARLY)]
        curve = [(100 * (1 + k), 0.9 - (0.5 + 0.02 * number) / (k + 1)) for k in range(length)]
        made.append(Record(number, search().values(number), curve, status=ends.get(number, STOPPED_EARLY)))
    return made


@pytest.mark.filterwarnings("ignore")  # matplotlib's own
def test_a_plot_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert write_plot(tmp_path / "tune.png", search(), records())
    assert (tmp_path / "tune.png").read_bytes().startswith(b"\x89PNG")
    assert write_plot(tmp_path / "empty.png", search(), [])


def test_without_matplotlib_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not write_plot(tmp_path / "tune.png", search(), records())
