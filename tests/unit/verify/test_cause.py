"""Causes: reasoned from what differs and from the lines of a script."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepstep.verify.cause import lost_variables, of_nondeterminism
from keepstep.verify.compare import Comparison, Difference
from keepstep.verify.prints import Attempt, Print, Suspect
from keepstep.verify.source import Source

SCRIPT = """
import datetime, torch
NAMES = {"a", "b"}

class Data:
    def __init__(self):
        self.generator = torch.Generator().manual_seed(3)

def main():
    best, count = 0.0, 0
    for name in NAMES:
        count += hash(name)
    for name in sorted(NAMES):
        print(datetime.datetime.now())
    torch.Generator().seed()
"""


@pytest.fixture
def source(tmp_path: Path) -> Source:
    (tmp_path / "train.py").write_text(SCRIPT)
    return Source(str(tmp_path / "train.py"), ["train.py"])


def test_lines_are_found_in_the_source(source: Source) -> None:
    assert source.line_of("train.py", "main", "count") == 10
    assert source.line_of("train.py", "Data", "self.generator") == 7
    assert source.line_of("train.py", "<module>", "NAMES") == 3
    assert source.line_of("train.py", "main", "nothing") is None
    assert source.line_of("gone.py", "main", "count") is None
    assert ("train.py", 7) in source.generators()
    assert source.unseeded_torch() == [("train.py", 15)]
    assert source.dates() == [("train.py", 14)]
    assert sorted(source.hash_orders()) == [("train.py", 11), ("train.py", 12)]


def attempt(begin: int, *variables: dict[str, str]) -> Attempt:
    prints = [Print(begin + n, [], {}, {}, values) for n, values in enumerate(variables)]
    return Attempt(1, {}, prints)


def test_a_variable_that_a_restart_did_not_bring_back_is_lost() -> None:
    """Neither one that is another in every run, nor one that the loop has yet to make, nor one that is as it was."""
    steps = [{"count": str(n), "width": "8", "began": "x", "loss": str(n)} for n in range(4)]
    expected = {0: [attempt(1, *steps)]}
    undisturbed = [{**values, "began": "y"} for values in steps[:3]]
    resumed = {"count": "0", "width": "8", "began": "z", "noise": "g12"}
    found = {0: [attempt(1, *undisturbed), attempt(3, resumed)]}
    assert lost_variables(expected, found, Difference("weights", "w", 3, 0, 1)) == {"count": False}


def test_what_differs_after_the_first_difference_is_not_its_cause() -> None:
    steps = [{"count": str(n), "list": str(n)} for n in range(4)]
    expected = {0: [attempt(1, *steps)]}
    found = {
        0: [attempt(1, *steps[:2]), attempt(2, {"count": "0", "list": "1"}), attempt(3, {"count": "0", "list": "x"})]
    }
    assert lost_variables(expected, found, Difference("weights", "w", 2, 0, 1)) == {"count": False}
    assert lost_variables(expected, found, Difference("metrics", "total", 2, None, 0)) == {
        "count": False,
        "list": False,
    }


def test_a_generator_is_known_as_one() -> None:
    expected = {0: [attempt(1, {"noise": "g1"}, {"noise": "g2"}, {"noise": "g3"})]}
    found = {0: [attempt(1, {"noise": "g1"}, {"noise": "g2"}), attempt(3, {"noise": "g1"})]}
    assert lost_variables(expected, found, Difference("weights", "w", 3, 0, 1)) == {"noise": True}


CLOCK_IN_LOOP = Suspect("time", "time.time", "train.py", 30, False)
CLOCK_IN_DATA = Suspect("time", "time.time", "data.py", 5, True)
ENTROPY = Suspect("entropy", "numpy.random.default_rng", "data.py", 9, False)


@pytest.mark.parametrize(
    ("kind", "suspects", "device", "cause", "place"),
    [
        ("samples", [CLOCK_IN_LOOP, ENTROPY], "cpu", "unseeded-generator", "data.py:9"),
        ("samples", [CLOCK_IN_LOOP, CLOCK_IN_DATA], "cpu", "time-dependent-data", "data.py:5"),
        ("samples", [ENTROPY, CLOCK_IN_DATA], "cpu", "time-dependent-data", "data.py:5"),
        ("weights", [CLOCK_IN_LOOP], "cpu", "nondeterministic-kernel", None),
        ("weights", [CLOCK_IN_LOOP], "cuda", "nondeterministic-kernel", None),
        ("weights", [ENTROPY], "cuda", "unseeded-generator", "data.py:9"),
    ],
)
def test_the_likeliest_place_is_blamed(
    tmp_path: Path, kind: str, suspects: list[Suspect], device: str, cause: str, place: str | None
) -> None:
    calm = Comparison(3, 0, {}, {kind: Difference(kind, "x", 1, 0, 0)})
    empty = Source(str(tmp_path / "train.py"), [])
    found = of_nondeterminism(calm, suspects, empty, device, lambda: False)
    assert found.kind == cause and found.places[:1] == ((place,) if place else ())
    assert ("--deterministic" in found.advice) == (device == "cuda" and place is None)


def test_one_hash_seed_that_helps_is_the_proof(source: Source) -> None:
    calm = Comparison(3, 0, {}, {"weights": Difference("weights", "x", 1, 0, 0)})
    clean = Source("train.py", [])
    assert of_nondeterminism(calm, [], clean, "cpu", lambda: True).kind == "hash-order"
