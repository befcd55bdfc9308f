"""Every exercise: what a learner begins with is not right yet, and the solution is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKSHOP = Path(__file__).parents[2] / "workshop"
LESSONS = sorted(path.parent.parent for path in WORKSHOP.glob("*/exercises/checks.py"))
JUDGE = """
import json, sys
from pathlib import Path
from common.checks import judge
exercises = Path(sys.argv[1])
print(json.dumps([list(judge(exercises)), list(judge(exercises, exercises / "solutions"))]))
"""


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.name)
def test_beginnings_are_not_right_and_solutions_are(lesson: Path) -> None:
    environment = os.environ | {"PYTHONPATH": f"{WORKSHOP}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    words = [sys.executable, "-c", JUDGE, str(lesson / "exercises")]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    beginnings, solutions = json.loads(done.stdout.splitlines()[-1])
    assert 2 <= len(beginnings) <= 3
    assert [name for name, *_ in beginnings] == [name for name, *_ in solutions]
    for exercise, right, hint in beginnings:
        assert not right and hint, f"{exercise} is right before anything is written"
        assert "raised" not in hint, f"{exercise}: {hint}"
    assert [found for found in solutions if not found[1]] == []
