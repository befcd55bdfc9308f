"""Tells a right answer to an exercise from a wrong one.

A lesson's exercises/ holds the answers to be written, 1_name.py, 2_name.py …; exercises/checks.py has a function
`check_1(answer)`, `check_2(answer)` … for each, which gets the answer as a module and raises `Wrong` with a hint.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple


class Wrong(Exception):
    """The answer is not right; the text says what was found, and hints at what is missing."""


class Judgement(NamedTuple):
    exercise: str
    right: bool
    hint: str


def expect(condition: bool, hint: str) -> None:
    if not condition:
        raise Wrong(hint)


def expect_close(found: Any, expected: float, what: str, relative: float = 1e-6) -> None:
    is_number = isinstance(found, (int, float)) and not isinstance(found, bool)
    expect(is_number, f"{what}: a number was expected, {found!r} was found")
    expect(math.isclose(found, expected, rel_tol=relative), f"{what}: {found:g} is not right")


def judge(exercises: Path, answers: Path | None = None) -> Iterator[Judgement]:
    """Each exercise of the folder `exercises`; `answers`: where else the answers are."""
    checks = load(exercises / "checks.py")
    for path in sorted((answers or exercises).glob("[0-9]*_*.py")):
        try:
            answer = load(path)
            getattr(checks, f"check_{path.name.partition('_')[0]}")(answer)
        except Wrong as wrong:
            yield Judgement(path.stem, False, str(wrong))
        except NotImplementedError:
            yield Judgement(path.stem, False, "nothing is written yet")
        except Exception as error:  # whatever a learner's code raises is an answer that is not right
            yield Judgement(path.stem, False, f"it raised {type(error).__name__}: {error}")
        else:
            yield Judgement(path.stem, True, "")


def report(exercises: str) -> int:
    """Prints every judgement; 0: all right."""
    judged = list(judge(Path(exercises)))
    for exercise, right, hint in judged:
        print(f"{exercise}: {'right' if right else 'not yet: ' + hint}")
    return 0 if all(each.right for each in judged) else 1


def load(path: Path) -> ModuleType:
    """A file of a lesson, whose name may begin with a number, as a module."""
    spec = importlib.util.spec_from_file_location(f"exercise_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
