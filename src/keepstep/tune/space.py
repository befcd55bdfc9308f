"""The search space: read from text, never executed; the values of trial n are a function of the seed and n."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence

from keepstep.errors import ConfigError
from keepstep.tune.domain import Domain, Value

_EXAMPLES = {
    "choice": "choice(64,128)",
    "grid": "grid(0.1,0.2)",
    "uniform": "uniform(0,0.5)",
    "loguniform": "loguniform(1e-5,1e-2)",
    "randint": "randint(1,10)",
    "quniform": "quniform(16,128,16)",
}
_SHAPE = re.compile(r"\s*([A-Za-z][\w-]*)\s*=\s*([A-Za-z]\w*)\s*\((.*)\)\s*")
_WORD = re.compile(r"""\s*("[^"]*"|'[^']*'|[^,"'()]+?)\s*(,|$)""")


def parse_space(texts: Sequence[str]) -> tuple[Domain, ...]:
    """Raises what is wrong with the first entry that cannot be read."""
    if not texts:
        raise ConfigError(f"no --space was given; name what to search, as --space lr={_EXAMPLES['loguniform']}")
    domains = tuple(parse_domain(text) for text in texts)
    names = [domain.name for domain in domains]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"--space {twice[0]} was given twice; give each parameter once")
    return domains


def parse_domain(text: str) -> Domain:
    match = _SHAPE.fullmatch(text)
    if match is None:
        raise ConfigError(f"--space {text!r} is not NAME=KIND(VALUES); give it as lr={_EXAMPLES['loguniform']}")
    name, kind, inside = match.groups()
    if kind not in _EXAMPLES:
        raise ConfigError(f"--space {text!r}: there is no {kind}; choose one of {', '.join(_EXAMPLES.values())}")
    domain = Domain(name, kind, _values(inside, text))
    if problem := _problem(domain):
        raise ConfigError(f"--space {text!r}: {problem}; give it as {name}={_EXAMPLES[kind]}")
    return domain


def _values(inside: str, text: str) -> tuple[Value, ...]:
    values: list[Value] = []
    place, ended = 0, False
    while not ended:
        match = _WORD.match(inside, place)
        if match is None:
            rest = inside[place:].strip() or "nothing"
            raise ConfigError(
                f"--space {text!r}: found {rest} where a value was expected; values are divided by commas"
            )
        values.append(_value(match[1]))
        place, ended = match.end(), match[2] == ""
    return tuple(values)


def _value(word: str) -> Value:
    if word[0] in "\"'":
        return word[1:-1]
    if word.lower() in ("true", "false"):
        return word.lower() == "true"
    for kind in (int, float):
        try:
            number = kind(word)
        except ValueError:
            continue
        return number if math.isfinite(number) else word
    return word


def _problem(domain: Domain) -> str | None:
    if domain.is_list:
        return None
    numbers, wanted = domain.arguments, 3 if domain.kind == "quniform" else 2
    if len(numbers) != wanted:
        return f"{domain.kind} takes {wanted} numbers, not {len(numbers)}"
    kinds = (int,) if domain.kind == "randint" else (int, float)
    for number in numbers:
        if type(number) not in kinds:
            return f"{number!r} is no {'whole ' if domain.kind == 'randint' else ''}number"
    low, high, *step = [float(number) for number in numbers]
    if low >= high:
        return f"the lower bound, {numbers[0]}, is not below the upper one, {numbers[1]}"
    if domain.is_logarithmic and low <= 0:
        return f"the lower bound is {numbers[0]}; a logarithm needs one above 0"
    if step and not 0 < step[0] <= high - low:
        return f"the step is {numbers[2]}; it must be above 0 and fit between the bounds"
    return None


def num_combinations(space: Sequence[Domain]) -> int:
    """Of the values of all grids; 1 where there is none."""
    return math.prod(len(domain.arguments) for domain in space if domain.kind == "grid")


def values_of(space: Sequence[Domain], seed: int, number: int) -> dict[str, Value]:
    """The values of trial `number`: no state, so that a search that is resumed, or made longer, draws the same ones.

    Grids are gone through in order, the last one fastest; others are drawn, each from a source of its own.
    """
    values: dict[str, Value] = {}
    left = number
    for domain in reversed(space):
        if domain.kind == "grid":
            left, place = divmod(left, len(domain.arguments))
            values[domain.name] = domain.arguments[place]
        else:
            values[domain.name] = domain.draw(random.Random(f"{seed}/{number}/{domain.name}"))
    return {domain.name: values[domain.name] for domain in space}


def perturbed(space: Sequence[Domain], values: dict[str, Value], seed: int, order: int) -> dict[str, Value]:
    """The donor's values, changed a little: population based training's `order`-th copy."""
    source = random.Random(f"{seed}/copy/{order}")
    return {domain.name: domain.perturb(values[domain.name], source) for domain in space}


def as_arguments(values: dict[str, Value]) -> list[str]:
    """As the script's arguments: `--lr 0.00123`; a boolean is a flag that is there or not."""
    words: list[str] = []
    for name, value in values.items():
        if value is True:
            words.append(f"--{name}")
        elif value is not False:
            words += [f"--{name}", str(value)]
    return words
