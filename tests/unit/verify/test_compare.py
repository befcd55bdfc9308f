"""Two runs' fingerprints: equal, or where they first differ; and the same for another number of workers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from keepstep.folder import RunFolder
from keepstep.verify.compare import compare, unsteady_metrics
from keepstep.verify.resized import compare_resized

LAYOUT = [["weights", "model/a"], ["optimizer", "optimizer/lr"]]


def line(step: int, **changed: Any) -> dict[str, Any]:
    batch = {"content": f"content {step}", "count": 2, "samples": step * 10, "indices": step * 100}
    plain = {"step": step, "epoch": 0, "batches": [batch], "rng": {"torch": "t"}, "variables": {}}
    return {**plain, "state": f"{step:016x}{0:016x}", **changed}


def start(workers: int = 1) -> list[dict[str, Any]]:
    return [{"start": 1.0, "pid": 1, "machine": "m", "world_size": workers}, {"layout": LAYOUT}]


def run(folder: Path, name: str, ranks: list[list[dict[str, Any]]], losses: list[float] | None = None) -> RunFolder:
    prints = folder / name / "fingerprints"
    prints.mkdir(parents=True)
    for rank, lines in enumerate(ranks):
        (prints / f"rank_{rank}.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in lines))
    metrics = [{"step": n, "epoch": 0, "loss": loss} for n, loss in enumerate(losses or [3.0, 2.0, 1.0], 1)]
    (folder / name / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in metrics))
    return RunFolder(folder, name)


PLAIN = [*start(), line(1), line(2), line(3)]


def test_a_run_that_made_steps_again_in_the_same_way_is_equal(tmp_path: Path) -> None:
    again = [*start(), line(1), line(2), *start(), line(2), line(3)]
    found = compare(run(tmp_path, "a", [PLAIN]), run(tmp_path, "b", [again]))
    assert found.differences == {} and found.first is None
    assert (found.steps, found.replayed) == (3, 1)
    assert found.counts == {"samples": 4, "rng": 4, "weights": 4, "optimizer": 4, "metrics": 9}


def test_a_step_that_is_made_again_in_another_way_differs_even_if_it_comes_right_later(tmp_path: Path) -> None:
    other = f"{9:016x}{0:016x}"
    again = [*start(), line(1), line(2, state=other), *start(), line(2), line(3)]
    first = compare(run(tmp_path, "a", [PLAIN]), run(tmp_path, "b", [again])).first
    assert first is not None
    assert (first.kind, first.name, first.step, first.rank, first.attempt) == ("weights", "model/a", 2, 0, 0)


def test_within_a_step_the_cause_comes_before_its_consequence(tmp_path: Path) -> None:
    batch = [{"content": "other", "count": 2, "samples": 1, "indices": 200}]
    changed = [*start(), line(1), line(2, state="f" * 32, batches=batch), line(3, rng={"torch": "other"})]
    found = compare(run(tmp_path, "a", [PLAIN, PLAIN]), run(tmp_path, "b", [PLAIN, changed], [3.0, 2.5, 1.0]))
    assert found.first is not None
    assert (found.first.kind, found.first.step, found.first.rank) == ("samples", 2, 1)
    assert set(found.differences) == {"samples", "weights", "optimizer", "rng", "metrics"}
    assert found.differences["metrics"].name == "loss"


@pytest.mark.parametrize("lines", [PLAIN[:-1], [*PLAIN, line(4)]])
def test_steps_that_are_missing_or_too_many_differ(tmp_path: Path, lines: list[dict[str, Any]]) -> None:
    found = compare(run(tmp_path, "a", [PLAIN]), run(tmp_path, "b", [lines]))
    assert set(found.differences) == {"steps"}


def test_a_line_that_a_kill_cut_short_is_passed_over(tmp_path: Path) -> None:
    other = run(tmp_path, "b", [[*start(), line(1), line(2)]])
    with (other.path / "fingerprints" / "rank_0.jsonl").open("a") as file:
        file.write(json.dumps(line(3))[:40] + "\n" + "".join(json.dumps(e) + "\n" for e in [*start(), line(3)]))
    assert compare(run(tmp_path, "a", [PLAIN]), other).differences == {}


def test_metrics_that_differ_anyway_can_be_left_out(tmp_path: Path) -> None:
    one, other = run(tmp_path, "a", [PLAIN]), run(tmp_path, "b", [PLAIN], [3.0, 2.5, 1.0])
    assert set(compare(one, other).differences) == {"metrics"}
    assert unsteady_metrics(one, other) == {"loss"}
    assert compare(one, other, frozenset({"loss"})).differences == {}


def halves(step: int, of: int, **changed: Any) -> dict[str, Any]:
    """One of two workers' parts of the batch that `line` has whole."""
    content = {"content": f"half {of}", "count": 1, "samples": step * 5, "indices": step * 50}
    return line(step, batches=[{**content, **changed}])


def test_another_number_of_workers_sees_the_same_samples(tmp_path: Path) -> None:
    ranks = [[*start(), line(1), *start(2), *(halves(step, rank) for step in (2, 3))] for rank in range(2)]
    ranks[1] = ranks[1][3:]
    found = compare_resized(run(tmp_path, "a", [PLAIN]), run(tmp_path, "b", ranks, [3.0, 2.0, 1.003]), frozenset())
    assert found.is_good and found.same_samples and found.compared_by == "numbers"
    assert (found.workers_before, found.workers, found.at_step, found.steps) == (1, 2, 1, 2)
    assert found.metric == "loss" and found.largest == pytest.approx(0.001)


def test_other_samples_or_other_metrics_are_not_good(tmp_path: Path) -> None:
    reference = run(tmp_path, "a", [PLAIN])
    for name, changed, losses in (("b", {"indices": 7}, None), ("c", {}, [3.0, 2.0, 1.2])):
        ranks = [[*start(2), halves(2, 0), halves(3, 0)], [*start(2), halves(2, 1), halves(3, 1, **changed)]]
        found = compare_resized(reference, run(tmp_path, name, ranks, losses), frozenset())
        assert not found.is_good
        assert found.first_other_sample == (3 if name == "b" else None)
