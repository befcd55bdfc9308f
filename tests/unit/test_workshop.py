"""The workshop's command: lists lessons, takes one out, opens it, and checks answers."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from keepstep import workshop
from keepstep.cli import main

RIGHT = "def answer():\n    return 2\n"
CHECKS = """
from common.checks import expect


def check_1(answer):
    expect(answer.answer() == 2, "1 + 1 is not that")
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A workshop of one lesson."""
    root = tmp_path / "installed"
    exercises = root / "01-adding" / "exercises"
    exercises.mkdir(parents=True)
    (root / "common").mkdir()
    (root / "common" / "__init__.py").touch()
    real = Path(__file__).parents[2] / "workshop" / "common" / "checks.py"
    (root / "common" / "checks.py").write_text(real.read_text())
    (root / "01-adding" / "README.md").write_text("# 01 · Adding numbers\n")
    (root / "01-adding" / "Adding.ipynb").write_text("{}")
    (exercises / "1_sum.py").write_text("def answer():\n    return 3\n")
    (exercises / "checks.py").write_text(CHECKS)
    (exercises / "solutions").mkdir()
    (exercises / "solutions" / "1_sum.py").write_text(RIGHT)
    monkeypatch.setattr(workshop, "_INSTALLED", root)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(workshop.shutil, "which", lambda *_, **__: None)
    return root


def test_it_lists_the_lessons(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["workshop"]) == 0
    assert capsys.readouterr().out.startswith("  1  Adding numbers\n")


def test_a_lesson_is_taken_out_without_its_solutions(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["workshop", "1"]) == 0
    assert (Path("workshop") / "common" / "checks.py").is_file()
    assert (Path("workshop") / "01-adding" / "exercises" / "1_sum.py").is_file()
    assert not (Path("workshop") / "01-adding" / "exercises" / "solutions").exists()
    assert "pip install jupyterlab" in capsys.readouterr().out


def test_what_a_learner_wrote_stays(root: Path) -> None:
    main(["workshop", "1"])
    answer = Path("workshop") / "01-adding" / "exercises" / "1_sum.py"
    answer.write_text(RIGHT)
    main(["workshop", "1"])
    assert answer.read_text() == RIGHT


@pytest.mark.parametrize(("user", "flags"), [(1000, "--ip=127.0.0.1"), (0, "--ip=127.0.0.1 --allow-root")])
def test_its_notebook_opens_on_this_machine_only(
    root: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    user: int,
    flags: str,
) -> None:
    monkeypatch.setattr(workshop.os, "geteuid", lambda: user)
    jupyter = tmp_path / "jupyter-lab"
    jupyter.write_text('#!/bin/sh\necho "$@"\n')
    jupyter.chmod(stat.S_IRWXU)
    monkeypatch.setattr(workshop.shutil, "which", lambda *_, **__: str(jupyter))
    assert main(["workshop", "1", "--folder", "mine"]) == 0
    assert f"{flags} mine/01-adding/Adding.ipynb" in capfd.readouterr().out


def test_a_wrong_number_is_answered_with_the_right_ones(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["workshop", "7"]) == 2
    assert "there is no lesson 7; there are 1" in capsys.readouterr().err


def test_answers_are_checked_where_they_are(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["workshop", "1", "--check"]) == 2
    assert "take the lesson out first: keepstep workshop 1" in capfd.readouterr().err
    main(["workshop", "1"])
    assert main(["workshop", "1", "--check"]) == 1
    assert "1_sum: not yet: 1 + 1 is not that" in capfd.readouterr().out
    (Path("workshop") / "01-adding" / "exercises" / "1_sum.py").write_text(RIGHT)
    assert main(["workshop", "1", "--check"]) == 0
    assert "1_sum: right" in capfd.readouterr().out
