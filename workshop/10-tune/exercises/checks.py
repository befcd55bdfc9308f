"""Tells right answers to this lesson's exercises from wrong ones."""

from __future__ import annotations

from itertools import pairwise
from types import ModuleType

from common.checks import expect


def check_1(answer: ModuleType) -> None:
    rates = list(answer.draw(1e-5, 1e-1, 4000, seed=3))
    expect(len(rates) == 4000, f"4000 rates were asked for, {len(rates)} came")
    expect(all(1e-5 <= rate <= 1e-1 for rate in rates), "a rate lies outside of the bounds")
    bounds = [1e-5, 1e-4, 1e-3, 1e-2, 1e-1]
    for low, high in pairwise(bounds):
        share = sum(low <= rate < high for rate in rates) / len(rates)
        expect(
            0.2 < share < 0.3,
            f"{share:.1%} of the rates lie between {low:g} and {high:g}; a quarter was expected: draw the exponent",
        )
    expect(len(set(rates)) > 3900, "many rates are the same one: draw them, do not list them")
    expect(rates == list(answer.draw(1e-5, 1e-1, 4000, seed=3)), "the same seed gave other rates")
    expect(rates != list(answer.draw(1e-5, 1e-1, 4000, seed=4)), "another seed gave the same rates")


def check_2(answer: ModuleType) -> None:
    accuracies = {"a": 0.1, "b": 0.9, "c": 0.5, "d": 0.7, "e": 0.2, "f": 0.3}
    _expect_survivors(answer, accuracies, 3, "max", {"b", "d"})
    _expect_survivors(answer, accuracies, 3, "min", {"a", "e"}, "a loss is better when it is smaller")
    _expect_survivors(answer, dict(list(accuracies.items())[:4]), 3, "max", {"b", "d"}, "4 / 3 is rounded up")
    nan = float("nan")
    hint = "nan > x and nan < x are both False, so that sorting leaves it anywhere: take it out first"
    for place in range(4):  # where it stands must not matter
        others = [("good", 0.2), ("fair", 0.4), ("poor", 0.9)]
        _expect_survivors(answer, dict([*others[:place], ("diverged", nan), *others[place:]]), 2, "min",
                          {"good", "fair"}, hint)  # fmt: skip
    _expect_survivors(answer, {"a": nan, "b": nan, "c": 1.0}, 1, "max", {"c"}, hint)


def _expect_survivors(
    answer: ModuleType, values: dict[str, float], keep: int, mode: str, right: set[str], hint: str = ""
) -> None:
    found = set(answer.survivors(dict(values), keep, mode))
    said = f"survivors({values}, keep={keep}, mode={mode!r}) gave {sorted(found)}, expected {sorted(right)}"
    expect(found == right, f"{said}: {hint}" if hint else said)


def check_3(answer: ModuleType) -> None:
    for trials, epochs, keep, right in [
        (9, 9, 3, 21),
        (1, 5, 3, 5),
        (27, 27, 3, 81),
        (5, 9, 3, 13),
        (8, 6, 2, 18),
    ]:
        found = answer.num_epochs(trials, epochs, keep)
        expect(
            found == right,
            f"num_epochs(trials={trials}, epochs={epochs}, keep={keep}) gave {found}: count, from rung to rung, the "
            "trials that are left times the epochs to the next rung, or to the end",
        )
