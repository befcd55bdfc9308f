"""A search as it was asked for."""

from __future__ import annotations

from typing import Any

import pytest

from keepstep.errors import ConfigError
from keepstep.job import Target
from keepstep.tune.search import Options, Search


def search(settings: dict[str, Any] | None = None, **options: Any) -> Search:
    asked = Options(**{"space": ("lr=loguniform(1e-4,1e-1)", "width=choice(64,128)"), "metric": "acc:max", **options})
    return Search.of(settings or {}, Target("train.py", ("--epochs", "2")), asked, "find")


def test_a_trials_command_is_that_of_a_run_of_its_own() -> None:
    found = search({"workers": 2, "compile": True, "cpus_per_worker": 4.0, "address": "auto", "name": "find"})
    words = found.words(found.run_name(7), "/runs", found.target, {"lr": 0.001, "width": 64})
    expected = "run --name find-0007 --storage /runs --workers 2 --compile train.py --epochs 2 --lr 0.001 --width 64"
    assert words == expected.split()
    assert found.best_command({"lr": 0.001, "width": 64}).startswith("keepstep run --name find-best --storage runs")


@pytest.mark.parametrize(
    ("settings", "options", "complaint"),
    [
        ({"engine": "ray"}, {}, "would reserve a trial's workers a second time"),
        ({"workers": "2:4"}, {}, "a fixed number of workers"),
        ({"workers": 0}, {}, "at least 1 is needed"),
        ({}, {"metric": "accuracy"}, "give METRIC:max or METRIC:min"),
        ({}, {"grace": 0}, "--grace is 0"),
        ({}, {"trials": 0}, "--trials is 0"),
        ({}, {"method": "bayes"}, "choose one of asha, pbt, random, grid"),
        ({}, {"method": "grid"}, "lr is loguniform(...): list its values"),
        ({}, {"method": "grid", "space": ("a=choice(1,2)",), "trials": 3}, "the grid has 2 combinations"),
        ({}, {"method": "pbt"}, "give --checkpoint-every"),
        ({"checkpoint_every": "5"}, {"method": "pbt", "trials": 1}, "must be at least 2"),
        ({"checkpoint_every": "5", "storage": "s3://b/r"}, {"method": "pbt"}, "not an object store"),
    ],
)
def test_what_cannot_work_is_refused(settings: dict[str, Any], options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError) as refused:
        search(settings, **options)
    assert complaint in str(refused.value)


def test_the_number_of_trials() -> None:
    assert search().trials == 10
    assert search(trials=3).trials == 3
    assert search(space=("a=grid(1,2)", "b=grid(1,2,3)")).trials == 6
    assert search(space=("a=choice(1,2)", "b=grid(1,2,3)"), method="grid").trials == 6
    assert search(metric="val:loss:min").metric == "val:loss"
