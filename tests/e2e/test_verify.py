"""`keepstep verify` as a person runs it: sound scripts are certified, planted defects are caught and named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from keepstep.folder import RunFolder
from keepstep.verify.plan import RANK, SAVE, STOP, draw

SCRIPTS = Path(__file__).with_name("verify")


def verify(folder: Path, script: str, *flags: str) -> tuple[int, dict[str, Any], str]:
    """(exit code, certificate, all that was printed)."""
    words = [sys.executable, "-m", "keepstep", "verify", "--device", "cpu", "--storage", "runs", "--output", "out"]
    done = subprocess.run(
        [*words, *flags, str(SCRIPTS / f"{script}.py")],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=280,
        env=dict(os.environ),
    )
    path = folder / "out" / "certificate.json"
    certificate = json.loads(path.read_text()) if path.exists() else {}
    return done.returncode, certificate, done.stdout + done.stderr


def marked_line(script: str) -> int:
    lines = (SCRIPTS / f"{script}.py").read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if "# DEFECT" in line)


slow = pytest.mark.slow
TWO = ("--workers", "2", "--strategy", "fsdp2")


@pytest.mark.parametrize(
    ("script", "flags"),
    [
        pytest.param("plain", (), marks=slow),
        pytest.param("augmented", (), marks=slow),
        pytest.param("ema", (), marks=slow),
        ("accumulated", TWO),
        pytest.param("gan", (), marks=slow),
    ],
)
def test_sound_scripts_are_certified(tmp_path: Path, script: str, flags: tuple[str, ...]) -> None:
    code, certificate, printed = verify(tmp_path, f"sound/{script}", "--kills", "1", *flags)
    assert code == 0, printed
    assert certificate["certified"] and certificate["cause"] is None and certificate["problems"] == []
    (comparison,) = certificate["comparisons"]
    assert comparison["equal"] and comparison["steps"] == certificate["steps"] == 32
    kill = next(fault for fault in certificate["faults"] if fault["kind"] != STOP)
    # A kill may fall between a step's beat and the note of what it did: that step was made, and is noted once only.
    assert kill["steps_lost"] is not None and comparison["replayed"] >= kill["steps_lost"] - 1
    assert kill["recovered_s"] > 0
    changed = certificate["changed_workers"]
    assert changed["done"] and changed["same_samples"] and changed["compared_by"] == "numbers" and changed["steps"] > 5
    if script in ("plain", "ema", "accumulated"):
        assert changed["depends_on_split"] == "" and changed["largest"] < 1e-5
    if script == "augmented":
        assert "steps_per_s" in certificate["notes"][0]
    names = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert [name.rpartition("-")[2] for name in names[1:] if name.endswith(("faults", "resized"))] == [
        "faults",
        "resized",
    ]
    page = (tmp_path / "out" / "certificate.html").read_text()
    assert "Certified" in page and str(tmp_path) not in page and "http" not in page


@pytest.mark.parametrize(
    ("script", "kind", "has_line"),
    [
        pytest.param("unseeded", "unseeded-generator", True, marks=slow),
        ("untracked", "untracked-state", True),
        pytest.param("timed", "time-dependent-data", True, marks=slow),
        pytest.param("race", "nondeterministic-kernel", False, marks=slow),
        pytest.param("generator", "untracked-generator", True, marks=slow),
        pytest.param("hashed", "hash-order", True, marks=slow),
    ],
)
def test_planted_defects_are_caught_and_their_cause_named(
    tmp_path: Path, script: str, kind: str, has_line: bool
) -> None:
    name = f"defects/{script}"
    code, certificate, printed = verify(tmp_path, name, "--kills", "1")
    assert code == 1, printed
    assert not certificate["certified"]
    cause = certificate["cause"]
    assert cause["kind"] == kind, cause
    if has_line:
        assert cause["places"][0] == f"{script}.py:{marked_line(name)}"
    (comparison,) = certificate["comparisons"]
    first = comparison["first"]
    assert first["kind"] == ("samples" if script in ("unseeded", "timed") else "weights")
    if kind.startswith("untracked"):  # not before the first restart, and at once after it
        resumed = [fault["resumed_from"] for fault in certificate["faults"]]
        assert first["attempt"] == 1 and first["step"] == resumed[0] + 1
    assert cause["advice"] in printed


@pytest.mark.slow
def test_three_kills_are_of_three_kinds_and_none_is_survived_by_luck(tmp_path: Path) -> None:
    code, certificate, printed = verify(tmp_path, "sound/plain", "--kills", "3", "--faults-seed", "11")
    assert code == 0, printed
    assert sorted({fault["kind"] for fault in certificate["faults"]}) == ["all", RANK, SAVE, STOP]
    assert certificate["seed_of_faults"] == 11
    saves = [fault for fault in certificate["faults"] if fault["kind"] == SAVE and fault["phase"].startswith("save of")]
    planned = [fault for fault in draw(11, 3, 32, 3, 1) if fault.kind == SAVE]
    assert len(saves) == 1 and saves[0]["planned_step"] == planned[0].step
    runs = [RunFolder(tmp_path / "runs", path.name) for path in (tmp_path / "runs").glob("*-faults*")]
    killed = [f for run in runs for e in run.read_events() if e["event"] == "failed" for f in e["failures"]]
    kills = [fault for fault in certificate["faults"] if fault["kind"] != STOP]
    assert [failure["cause"] for failure in killed] == ["SIGKILL"] * len(kills)


def test_what_cannot_be_verified_is_refused(tmp_path: Path) -> None:
    (tmp_path / "short.py").write_text((SCRIPTS / "sound" / "plain.py").read_text().replace("epochs(4)", "epochs(0)"))
    words = [sys.executable, "-m", "keepstep", "verify", "--device", "cpu"]

    def refused(*rest: str) -> str:
        done = subprocess.run([*words, *rest], cwd=tmp_path, capture_output=True, text=True, timeout=200)
        assert done.returncode == 2, done.stdout + done.stderr
        return done.stdout + done.stderr

    assert "--kills is 0" in refused("--kills", "0", "short.py")
    assert "there is no script" in refused("none.py")
    assert "verify keeps its runs in a folder" in refused("--storage", "s3://bucket/runs", "short.py")
    assert "one number of workers" in refused("--engine", "ray", "--workers", "1:2", "short.py")
    assert "without a step" in refused("short.py")
