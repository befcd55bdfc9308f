"""The comparison tables are made from what is there and what happens, by one command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

WORKSHOP = Path(__file__).parents[2] / "workshop"


def compare(output: Path, *words: str) -> tuple[dict[str, Any], str]:
    done = subprocess.run(
        [sys.executable, str(WORKSHOP / "compare.py"), "--output", str(output), *words],
        capture_output=True, text=True, timeout=1500, env=os.environ,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((output / "tables.json").read_text()), (output / "tables.md").read_text()


def test_lines_are_counted(tmp_path: Path) -> None:
    tables, page = compare(tmp_path, "--only", "code", "steps")
    counted = {row["script"]: row for row in tables["code"]}
    assert counted["train_single_machine.py"]["boilerplate"] == 0
    assert counted["train_ddp.py"]["set-up steps"] == 9
    vanilla, ray, keepstep = (
        counted[script]["boilerplate"] for script in ("train_ddp.py", "train_ray_ddp.py", "train_keepstep.py")
    )
    assert 0 < keepstep < min(vanilla, ray) / 3
    assert "| train_ddp.py |" in page and "average the gradients" in page


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_what_runs_is_measured(tmp_path: Path, data: str) -> None:
    os.environ["KEEPSTEP_DATA"] = data
    small = ("--rounds", "1", "--epochs", "2")
    tables, _ = compare(tmp_path, "--only", "training", "kill", "memory", *small)
    versions = [row for row in tables["training"] if row["workers"] == 2]
    assert {row["accuracy"] for row in versions} == {versions[0]["accuracy"]}, "the same samples, the same weights"
    vanilla, raw, keepstep = tables["kill"]
    assert "exit code 1" in vanilla["what happened"]
    assert (keepstep["samples repeated"], keepstep["lost"]) == (0, 0)
    assert keepstep["weights as if nothing had been"] == "yes"
    assert raw["samples repeated"] + raw["lost"] > 0
    held = {row["strategy"]: float(row["bytes a parameter"]) for row in tables["memory"]}
    assert held["fsdp2"] < 0.7 * held["ddp"] and held["zero3"] < held["ddp"]
