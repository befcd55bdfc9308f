"""Stages on Ray have as many workers as there is room for, and say what is wrong in a line."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("ray", reason="needs keepstep[voice]")

import ray
from on_ray import as_workers_find, ray_errors_named, workers_with_room


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Of the Ray that is there: to be filled."""
    has: dict[str, float] = {}
    monkeypatch.setattr(ray, "cluster_resources", lambda: has)
    return has


@pytest.mark.parametrize(
    ("has", "given", "said", "needs"),
    [
        ((8, 0), {}, "8 workers on CPUs", (1, 0)),
        ((8, 0), {"spare_cpus": 1}, "7 workers on CPUs", (1, 0)),
        ((1, 0), {"spare_cpus": 1}, "1 worker on CPUs", (1, 0)),
        ((8, 0), {"spare_cpus": 1, "asked": 8}, "8 workers on CPUs", (1, 0)),
        ((8, 0), {"cpus_each": 3}, "2 workers on CPUs", (3, 0)),
        ((8, 2), {"spare_cpus": 1}, "2 workers on GPUs", (1, 1)),
        ((8, 4), {"cpus_each": 4}, "2 workers on GPUs", (4, 1)),
        ((8, 2), {"device": "cpu"}, "8 workers on CPUs", (1, 0)),
    ],
)
def test_workers_fill_the_room(room: dict[str, float], has, given, said, needs) -> None:  # type: ignore[no-untyped-def]
    room.update(CPU=has[0], GPU=has[1])
    workers = workers_with_room(**{"device": "auto", "asked": None} | given)
    assert str(workers) == said and tuple(workers.needs.values()) == needs
    assert workers.device == ("cuda" if needs[1] else "cpu")
    assert workers.at_most(1).num == 1 and workers.at_most(100) == workers


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"device": "cuda"}, "--device cuda: this Ray has no GPU"),
        ({"asked": 5}, "--num-workers 5: this Ray has room for 4: give 4 or fewer"),
        ({"asked": 3, "cpus_each": 2}, "has room for 2"),
        ({"cpus_each": 5}, "--cpus-per-worker 5: this Ray has 4: give 4 or fewer"),  # Ray would wait for ever
    ],
)
def test_more_than_there_is_room_for_is_named(room: dict[str, float], given, message: str) -> None:  # type: ignore[no-untyped-def]
    room.update(CPU=4.0)
    with pytest.raises(ValueError, match=message):
        workers_with_room(**{"device": "auto", "asked": None} | given)


def test_what_ray_gives_up_on_is_said_in_a_line() -> None:
    with (
        pytest.raises(ValueError, match=r"^Ray gave up \(the node died\); what is done is kept"),
        ray_errors_named(),
    ):
        raise ray.exceptions.RayError("the node died\nwith a trace")


def test_workers_find_folders_and_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert as_workers_find("model") == as_workers_find("~/model") == str(tmp_path / "model")
    assert as_workers_find("small") == "small" and as_workers_find("Qwen/Base") == "Qwen/Base"
