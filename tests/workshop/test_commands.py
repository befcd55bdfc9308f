"""The page of documented commands is made by running them."""

from __future__ import annotations

import shlex
from pathlib import Path
from types import ModuleType

import pytest

WORKSHOP = Path(__file__).parents[2] / "workshop"


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(WORKSHOP))
    from common.checks import load

    return load(WORKSHOP / "commands.py")


def test_every_training_of_the_lessons_is_among_them(commands: ModuleType) -> None:
    for lesson, lines in commands.COMMANDS.items():
        named = {Path(word).name for line in lines for word in shlex.split(line)}
        assert {path.name for path in (WORKSHOP / lesson).glob("train*.py")} <= named


def test_what_is_shown_is_what_was_printed(commands: ModuleType, tmp_path: Path) -> None:
    lines = [
        "(RayTrainWorker pid=7) epoch 0: accuracy 26.03%",
        "2026-01-01 00:00:00,000 INFO of Ray",
        str(tmp_path / "a"),
    ]
    (tmp_path / "say.py").write_text(f"print(*{lines!r}, sep='\\n')\nraise SystemExit(3)\n")
    shown = commands.shown("python say.py", tmp_path)
    assert shown == "```\n$ python say.py\nepoch 0: accuracy 26.03%\na\n(exit code 3)\n```\n"
