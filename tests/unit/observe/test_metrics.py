"""Metrics are those of the whole global batch, whoever logged what, and metrics.jsonl is cut where a run resumes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keepstep.collective import Collective
from keepstep.errors import LoopError
from keepstep.observe.metrics import Metrics, MetricsFile, Record

RunRanks = Callable[[int, Callable[[Any, int], Any]], list[Any]]


def alone() -> Metrics:
    return Metrics(Collective(1, torch.device("cpu")))


def log(metrics: Metrics, step: int = 1, weight: float = 1.0, part: float | None = None, **values: Any) -> None:
    metrics.log(Record(step, 0, weight, True), values, part)


def between(metrics: Metrics, step: int = 1, epoch: int = 0, **values: Any) -> None:
    """Logged after an epoch's steps."""
    metrics.log(Record(step, epoch, 1.0, False), values, None)


def test_a_step_is_a_line() -> None:
    metrics = alone()
    log(metrics, 1, loss=0.5, lr=0.1)
    log(metrics, 2, loss=torch.tensor(0.25))
    assert metrics.reduce([])[0] == [
        {"step": 1, "epoch": 0, "loss": 0.5, "lr": 0.1},
        {"step": 2, "epoch": 0, "loss": 0.25},
    ]


def test_what_is_logged_in_several_calls_of_one_step_is_one_line() -> None:
    metrics = alone()
    log(metrics, 1, loss=0.5)
    log(metrics, 1, accuracy=0.75, loss=0.4)
    assert metrics.reduce([])[0] == [{"step": 1, "epoch": 0, "loss": 0.4, "accuracy": 0.75}]


def test_a_step_and_what_follows_it_are_two_lines() -> None:
    metrics = alone()
    log(metrics, 1, loss=0.5)
    between(metrics, 1, accuracy=0.9)
    assert [set(line) for line in metrics.reduce([])[0]] == [{"step", "epoch", "loss"}, {"step", "epoch", "accuracy"}]


def test_a_line_is_reduced_once() -> None:
    metrics = alone()
    log(metrics, 1, loss=0.5)
    metrics.reduce([])
    assert metrics.reduce([3.0]) == ([], [[3.0]])


def test_the_latest_value_of_every_metric_is_known() -> None:
    metrics = alone()
    log(metrics, 1, loss=0.5)
    between(metrics, 1, accuracy=0.9)
    metrics.reduce([])
    log(metrics, 2, loss=0.4)
    assert metrics.latest == {"loss": 0.5, "accuracy": 0.9}
    metrics.reduce([])
    assert metrics.latest == {"loss": 0.4, "accuracy": 0.9}


@given(st.lists(st.tuples(st.floats(-10, 10), st.integers(1, 5)), min_size=1, max_size=4))
def test_parts_of_a_batch_add_up_to_its_mean(parts: list[tuple[float, int]]) -> None:
    """Micro-batches: each counts by its share of the samples."""
    metrics = alone()
    size = sum(count for _, count in parts)
    for value, count in parts:
        log(metrics, 1, part=count / size, loss=value)
    expected = sum(value * count for value, count in parts) / size
    assert metrics.reduce([])[0][0]["loss"] == pytest.approx(expected, abs=1e-9)


def test_parts_of_tensors_add_up_without_changing_them() -> None:
    metrics = alone()
    losses = [torch.tensor(1.0, requires_grad=True), torch.tensor(3.0, requires_grad=True)]
    for loss in losses:
        log(metrics, 1, part=0.5, loss=loss)
    assert metrics.reduce([])[0][0]["loss"] == 2.0
    assert [loss.item() for loss in losses] == [1.0, 3.0]


class Elsewhere(torch.Tensor):
    """Stands for a tensor on a GPU, or a sharded one: not to be read at once."""


@pytest.mark.parametrize("kind", [torch.Tensor, Elsewhere])
def test_a_logged_tensor_does_not_keep_its_graph(kind: type[torch.Tensor]) -> None:
    metrics = alone()
    log(metrics, 1, loss=(torch.tensor(2.0, requires_grad=True) * 3).as_subclass(kind))
    value = metrics._pending[0].values["loss"]
    assert isinstance(value, Elsewhere if kind is Elsewhere else float)
    assert not getattr(value, "requires_grad", False) and float(value) == 6.0


@pytest.mark.parametrize("kind", [torch.Tensor, Elsewhere])
def test_a_tensor_that_changes_after_it_was_logged_is_logged_as_it_was(kind: type[torch.Tensor]) -> None:
    """A running total, or a weight: values are read later, when workers exchange them."""
    metrics = alone()
    total = torch.tensor(0.0).as_subclass(kind)
    for step in (1, 2, 3):
        total += step
        log(metrics, step, total=total)
    assert [line["total"] for line in metrics.reduce([])[0]] == [1.0, 3.0, 6.0]


@given(
    st.lists(st.tuples(st.floats(-100, 100), st.integers(0, 8)), min_size=2, max_size=4).filter(
        lambda ranks: sum(count for _, count in ranks) > 0
    )
)
def test_workers_values_are_weighted_by_their_samples(run_ranks: RunRanks, ranks: list[tuple[float, int]]) -> None:
    def work(collective: Any, rank: int) -> Any:
        metrics = Metrics(collective)
        value, count = ranks[rank]
        log(metrics, 1, weight=count, loss=value)
        lines, _ = metrics.reduce([])
        assert collective.calls == ["rows", "all_gather"], "one exchange, and one sum"
        return lines

    found = run_ranks(len(ranks), work)
    expected = sum(value * count for value, count in ranks) / sum(count for _, count in ranks)
    assert all(lines == found[0] for lines in found)
    assert found[0][0]["loss"] == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("alike", [True, False])
def test_a_stand_ins_nan_counts_for_nothing(run_ranks: RunRanks, alike: bool) -> None:
    def work(collective: Any, rank: int) -> Any:
        metrics = Metrics(collective)
        log(metrics, 1, weight=[2.0, 0.0][rank], loss=[0.5, math.nan][rank])
        if rank and not alike:
            log(metrics, 1, extra=1.0)
        return metrics.reduce([])[0]

    assert [lines[0]["loss"] for lines in run_ranks(2, work)] == [0.5, 0.5]


def test_a_workers_nan_is_seen(run_ranks: RunRanks) -> None:
    def work(collective: Any, rank: int) -> Any:
        metrics = Metrics(collective)
        log(metrics, 1, weight=2.0, loss=[0.5, math.nan][rank])
        return metrics.reduce([])[0]

    assert all(math.isnan(lines[0]["loss"]) for lines in run_ranks(2, work))


def test_every_worker_gets_every_workers_flags(run_ranks: RunRanks) -> None:
    def work(collective: Any, rank: int) -> Any:
        return Metrics(collective).reduce([float(rank), 7.0])[1]

    assert run_ranks(3, work) == [[[0.0, 7.0], [1.0, 7.0], [2.0, 7.0]]] * 3


def test_workers_that_logged_unlike_things_are_averaged_over_those_that_did(run_ranks: RunRanks) -> None:
    """`if run.is_main: run.log(...)` and the like: nothing hangs, nothing is lost, and everybody knows the same."""

    def work(collective: Any, rank: int) -> Any:
        metrics = Metrics(collective)
        log(metrics, 1, weight=[3.0, 1.0][rank], loss=[1.0, 5.0][rank])
        if rank == 0:
            log(metrics, 1, weight=3.0, only_main=8.0)
        if rank == 1:
            log(metrics, 2, weight=1.0, loss=9.0)
        if rank == 0:
            between(metrics, 2, accuracy=0.5)
        return metrics.reduce([])[0], metrics.latest

    found = run_ranks(2, work)
    assert found[0] == found[1]
    lines, latest = found[0]
    assert lines == [
        {"step": 1, "epoch": 0, "loss": 2.0, "only_main": 8.0},
        {"step": 2, "epoch": 0, "loss": 9.0},
        {"step": 2, "epoch": 0, "accuracy": 0.5},
    ]
    assert latest == {"loss": 9.0, "only_main": 8.0, "accuracy": 0.5}


def test_a_worker_that_logged_nothing_gets_what_the_others_did(run_ranks: RunRanks) -> None:
    def work(collective: Any, rank: int) -> Any:
        metrics = Metrics(collective)
        if rank == 0:
            log(metrics, 1, weight=2.0, loss=torch.tensor(0.5))
        return metrics.reduce([])[0]

    assert run_ranks(2, work) == [[{"step": 1, "epoch": 0, "loss": 0.5}]] * 2


def test_the_same_names_in_another_order_are_not_mixed_up(run_ranks: RunRanks) -> None:
    def work(collective: Any, rank: int) -> Any:
        metrics = Metrics(collective)
        values = {"a": 1.0, "b": 2.0} if rank == 0 else {"b": 2.0, "a": 1.0}
        log(metrics, 1, **values)
        return metrics.reduce([])[0]

    for lines in run_ranks(2, work):
        assert (lines[0]["a"], lines[0]["b"]) == (1.0, 2.0)


@pytest.mark.parametrize("value", [3, True, torch.tensor([1.5]), torch.tensor(2, dtype=torch.int32), torch.ones(1, 1)])
def test_any_one_number_can_be_logged(value: Any) -> None:
    metrics = alone()
    log(metrics, 1, x=value)
    assert metrics.reduce([])[0][0]["x"] == float(value)


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        (torch.ones(3), r"run.log\(loss=...\) got a tensor of shape \(3,\); log one number"),
        ([1.0], r"run.log\(loss=...\) got a list; log a number or a tensor of one"),
        (None, r"run.log\(loss=...\) got a NoneType; log a number"),
        ("high", r"run.log\(loss=...\) got a str; log a number"),
    ],
)
def test_what_is_not_one_number_is_refused(value: Any, complaint: str) -> None:
    with pytest.raises(LoopError, match=complaint):
        log(alone(), 1, loss=value)


# -- metrics.jsonl ----------------------------------------------------------------------------------------------------


def test_lines_are_written_as_json(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.write([{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.25}])
    file.write([])
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.25}]
    file.close()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_json_has_no_word_for_is_a_string_that_float_reads(tmp_path: Path, value: float) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.write([{"step": 1, "loss": value}])
    file.close()
    found = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=pytest.fail)
    assert isinstance(found["loss"], str)
    assert str(float(found["loss"])) == str(value)


def test_floats_are_written_to_the_last_bit(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.write([{"loss": 0.1 + 0.2}])
    file.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["loss"] == 0.1 + 0.2


def test_a_resumed_run_cuts_what_it_will_log_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    file.write([{"step": 1}])
    position = file.position()
    assert position == path.stat().st_size > 0
    file.write([{"step": 2}, {"step": 3}])
    file.close()
    resumed = MetricsFile(path)
    resumed.cut(position)
    resumed.write([{"step": 2, "again": 1}])
    resumed.close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"step": 1}, {"step": 2, "again": 1}]


@pytest.mark.parametrize("left", ["", '{"step": 1}\n'])
def test_cutting_a_file_that_is_shorter_fills_nothing_in(tmp_path: Path, left: str) -> None:
    """metrics.jsonl was deleted, or its end was lost: the run goes on, and what it writes can be read."""
    path = tmp_path / "metrics.jsonl"
    path.write_text(left)
    file = MetricsFile(path)
    file.cut(1000)
    file.write([{"step": 2}])
    file.close()
    assert path.read_bytes() == left.encode() + b'{"step": 2}\n'
