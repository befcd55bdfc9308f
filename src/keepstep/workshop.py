"""`keepstep workshop`: lists the lessons, takes one out into a folder and opens it, and checks its exercises."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from keepstep.errors import ConfigError

_INSTALLED = Path(__file__).parent / "_workshop"
_CHECKOUT = Path(__file__).parents[2] / "workshop"
_LEFT_BEHIND = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints", "output", "runs", "solutions")
_CHECK = "import sys; from common.checks import report; sys.exit(report(sys.argv[1]))"


@dataclass(frozen=True)
class Lesson:
    folder: Path

    @property
    def number(self) -> int:
        return int(self.folder.name.partition("-")[0])

    @property
    def title(self) -> str:
        """Its README's heading, without the number."""
        heading = (self.folder / "README.md").read_text().partition("\n")[0]
        return re.sub(r"^#\s*(\d+\s*[·:.-]?\s*)?", "", heading)

    @property
    def notebooks(self) -> list[str]:
        return sorted(path.name for path in self.folder.glob("*.ipynb"))


def workshop_root() -> Path:
    return _INSTALLED if _INSTALLED.is_dir() else _CHECKOUT


def lessons() -> list[Lesson]:
    folders = workshop_root().glob("[0-9][0-9]-*")
    return sorted((Lesson(folder) for folder in folders if (folder / "README.md").is_file()), key=lambda at: at.number)


def find_lesson(number: int) -> Lesson:
    """A wrong number is answered with the right ones."""
    for lesson in lessons():
        if lesson.number == number:
            return lesson
    raise ConfigError(f"there is no lesson {number}; there are {', '.join(str(each.number) for each in lessons())}")


def print_lessons() -> int:
    for lesson in lessons():
        print(f"{lesson.number:>3}  {lesson.title}")
    print("\nkeepstep workshop N           take lesson N out into ./workshop and open its notebook")
    print("keepstep workshop N --check   check your answers to its exercises")
    return 0


def start_lesson(number: int, folder: Path) -> int:
    """Takes the lesson out, or finds it there, and opens its notebook where Jupyter is installed."""
    lesson = find_lesson(number)
    for source in (workshop_root() / "common", lesson.folder):
        target = folder / source.name
        if not target.exists():  # what a learner has changed stays
            shutil.copytree(source, target, ignore=_LEFT_BEHIND)
    place = folder / lesson.folder.name
    print(f"lesson {number}, {lesson.title}: {place}")
    print(f"read {place / 'README.md'}; check your answers: keepstep workshop {number} --check --folder {folder}")
    if not lesson.notebooks:
        return 0
    beside_python = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    jupyter = shutil.which("jupyter-lab", path=beside_python)
    if jupyter is None:
        print(f"its notebook, {', '.join(lesson.notebooks)}, opens with Jupyter: pip install jupyterlab")
        return 0
    as_root = ["--allow-root"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []  # as in most containers
    return subprocess.call([jupyter, "--ip=127.0.0.1", *as_root, str(place / lesson.notebooks[0])])


def check_lesson(number: int, folder: Path) -> int:
    """Judges the answers in `folder`; 0: all right."""
    exercises = folder / find_lesson(number).folder.name / "exercises"
    if not exercises.is_dir():
        raise ConfigError(f"{exercises} is not there; take the lesson out first: keepstep workshop {number}")
    # In a process of its own, from the learner's own folder: an answer may do anything.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}
    return subprocess.call([sys.executable, "-c", _CHECK, str(exercises)], env=environment)
