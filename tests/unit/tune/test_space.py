"""The search space: what is read, what is refused, what is drawn."""

from __future__ import annotations

import random
from typing import Any

import pytest

from keepstep.errors import ConfigError
from keepstep.tune.domain import Domain
from keepstep.tune.space import as_arguments, num_combinations, parse_domain, parse_space, perturbed, values_of


@pytest.mark.parametrize(
    ("text", "kind", "arguments"),
    [
        ("lr=loguniform(1e-5,1e-2)", "loguniform", (1e-5, 1e-2)),
        (" lr = uniform( 0 , 0.5 ) ", "uniform", (0, 0.5)),
        ("width=choice(64,128)", "choice", (64, 128)),
        ("width=grid(64)", "grid", (64,)),
        ("fused=choice(true,False)", "choice", (True, False)),
        ("opt=choice(adam, sgd, 'a,b', \"(x)\", '7')", "choice", ("adam", "sgd", "a,b", "(x)", "7")),
        ("batch-size=quniform(16,128,16)", "quniform", (16, 128, 16)),
        ("n=randint(-1,10)", "randint", (-1, 10)),
        ("s=choice(inf,1e-3,os.system)", "choice", ("inf", 1e-3, "os.system")),
    ],
)
def test_what_is_read(text: str, kind: str, arguments: tuple[Any, ...]) -> None:
    domain = parse_domain(text)
    assert (domain.kind, domain.arguments) == (kind, arguments)
    assert parse_domain(str(domain)) == domain
    assert [type(found) for found in domain.arguments] == [type(value) for value in arguments]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("lr", "is not NAME=KIND"),
        ("lr=0.1", "is not NAME=KIND"),
        ("--lr=choice(1)", "is not NAME=KIND"),
        ("lr=normal(0,1)", "there is no normal; choose one of choice(64,128)"),
        ("lr=__import__(os)", "is not NAME=KIND"),
        ("lr=choice(__import__('os'))", "where a value was expected"),
        ("lr=choice()", "found nothing where a value was expected"),
        ("lr=choice(1,,2)", "where a value was expected"),
        ("lr=choice(1,2", "is not NAME=KIND"),
        ("lr=choice('a)", "where a value was expected"),
        ("lr=uniform(1)", "uniform takes 2 numbers, not 1"),
        ("lr=quniform(1,2)", "quniform takes 3 numbers"),
        ("lr=uniform(a,2)", "'a' is no number"),
        ("lr=uniform(true,2)", "True is no number"),
        ("lr=uniform(0,inf)", "'inf' is no number"),
        ("n=randint(1,2.5)", "2.5 is no whole number"),
        ("lr=uniform(2,1)", "lower bound, 2, is not below"),
        ("lr=loguniform(0,1)", "a logarithm needs one above 0"),
        ("lr=quniform(0,1,0)", "the step is 0"),
        ("lr=quniform(0,1,5)", "the step is 5"),
    ],
)
def test_what_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_domain(text)
    assert complaint in str(refused.value)


def test_a_space_is_needed_and_names_a_parameter_once() -> None:
    with pytest.raises(ConfigError, match="no --space was given"):
        parse_space([])
    with pytest.raises(ConfigError, match="lr was given twice"):
        parse_space(["lr=grid(1)", "lr=grid(2)"])


SPACE = parse_space(
    [
        "lr=loguniform(1e-5,1e-2)",
        "drop=uniform(0,0.5)",
        "layers=randint(1,4)",
        "batch=quniform(16,64,16)",
        "q=quniform(0,1,0.25)",
        "opt=choice(adam,sgd)",
    ]
)


def is_within(domain: Domain, value: Any) -> bool:
    if domain.is_list:
        return value in domain.arguments
    low, high = domain.arguments[:2]
    if domain.kind == "randint":
        return type(value) is int and low <= value < high  # type: ignore[operator]
    if domain.kind == "quniform":
        whole = all(type(argument) is int for argument in domain.arguments)
        return type(value) is (int if whole else float) and value % domain.arguments[2] == 0  # type: ignore[operator]
    return low <= value <= high  # type: ignore[operator, no-any-return]


def test_values_are_within_their_bounds_and_of_their_kind() -> None:
    drawn = [values_of(SPACE, 0, number) for number in range(200)]
    assert all(is_within(domain, values[domain.name]) for values in drawn for domain in SPACE)
    assert {values["layers"] for values in drawn} == {1, 2, 3}
    assert {values["batch"] for values in drawn} == {16, 32, 48, 64}
    below = sum(values["lr"] < 10**-3.5 for values in drawn)  # type: ignore[operator]
    assert 70 < below < 130, "half of a logarithmic range lies below its geometric middle"


def test_a_trials_values_are_a_function_of_seed_and_number() -> None:
    assert values_of(SPACE, 3, 7) == values_of(SPACE, 3, 7)
    assert values_of(SPACE, 3, 7) != values_of(SPACE, 3, 8)
    assert values_of(SPACE, 3, 7) != values_of(SPACE, 4, 7)
    assert values_of(SPACE[:1], 3, 7)["lr"] == values_of(SPACE, 3, 7)["lr"], "other parameters do not matter"


def test_grids_are_gone_through_in_order() -> None:
    space = parse_space(["a=grid(1,2)", "lr=uniform(0,1)", "b=grid(x,y,z)"])
    assert num_combinations(space) == 6
    found = [(values["a"], values["b"]) for values in (values_of(space, 0, number) for number in range(7))]
    assert found == [(1, "x"), (1, "y"), (1, "z"), (2, "x"), (2, "y"), (2, "z"), (1, "x")]


def test_perturbed_values_stay_within_their_bounds_and_are_reproducible() -> None:
    values = values_of(SPACE, 0, 0)
    seen = [values]
    for order in range(200):
        seen.append(perturbed(SPACE, seen[-1], 0, order))
    assert all(is_within(domain, values[domain.name]) for values in seen for domain in SPACE)
    assert perturbed(SPACE, values, 0, 1) == perturbed(SPACE, values, 0, 1)


def test_a_perturbed_number_is_near_and_a_perturbed_choice_its_neighbour() -> None:
    class NotAnew(random.Random):
        def random(self) -> float:
            return 0.9

    source = NotAnew(0)
    assert parse_domain("lr=uniform(0,1)").perturb(0.5, source) in (0.4, 0.6)
    assert parse_domain("n=grid(1,2,3,4)").perturb(2, source) in (1, 3)


def test_as_arguments() -> None:
    values = {"lr": 0.00123, "width": 64, "fused": True, "amp": False, "opt": "a b"}
    assert as_arguments(values) == ["--lr", "0.00123", "--width", "64", "--fused", "--opt", "a b"]
