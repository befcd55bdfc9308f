"""A recording that kills the process is left alone by later runs; one at which a run was stopped is not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("av", reason="needs keepstep[voice]")
pytest.importorskip("pyloudnorm", reason="needs keepstep[voice]")

import process
from process import main

RECIPE = Path(process.__file__).parent
DEADLY = """
import os, signal, sys
import process

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests that run under nohup hand down that it is ignored

class Recorder:
    def __init__(self, *_): pass

    def process(self, source):
        if source.name == "b":
            os.kill(os.getpid(), int(sys.argv[1]))
        return {"segments": [], "rejected": [], "warnings": [], "duration_s": 1.0}

process.Recorder = Recorder
process.main(sys.argv[2:])
"""
"""Process, with recordings that are nothing but names; b sends the signal."""


class Recorder:
    seen: list[str] = []  # noqa: RUF012

    def __init__(self, *_: Any) -> None:
        self.seen.clear()

    def process(self, source: process.Source) -> dict[str, Any]:
        self.seen.append(source.name)
        return {"segments": [], "rejected": [], "warnings": [], "duration_s": 1.0}


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    """For three recordings."""
    (tmp_path / "in").mkdir()
    for name in "abc":
        (tmp_path / "in" / f"{name}.wav").touch()
    (tmp_path / "texts.csv").write_text("id|text\na|One.\nb|Two.\nc|Three.\n")
    return ["--input-dir", str(tmp_path / "in"), "--output-dir", str(tmp_path / "out"), "--speaker-name", "Anna",
            "--transcripts", str(tmp_path / "texts.csv"), "--num-workers", "0", "--device", "cpu",
            "--i-have-consent"]  # fmt: skip


def ended_by(number: int, command: list[str]) -> int:
    return subprocess.run(
        [sys.executable, "-c", DEADLY, str(number), *command],
        env=os.environ | {"PYTHONPATH": str(RECIPE)},
        capture_output=True,
        timeout=200,
    ).returncode


def tries(folder: Path) -> list[str]:
    return [path.read_text() for path in (folder / "out" / ".done").glob("*.tries")]


def crashed(folder: Path, command: list[str]) -> list[dict[str, Any]]:
    """Runs to the end; what was rejected."""
    with pytest.raises(SystemExit, match="nothing can be used"):  # recordings without a segment
        main(command)
    return [json.loads(line) for line in (folder / "out" / "rejected.jsonl").read_text().splitlines()]


def test_a_recording_that_kills_two_runs_is_left_alone(
    tmp_path: Path, command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in ("1", "2"):
        assert ended_by(signal.SIGKILL, command) == -signal.SIGKILL
        assert tries(tmp_path) == [number]
    monkeypatch.setattr(process, "Recorder", Recorder)
    (row,) = crashed(tmp_path, command)
    assert Recorder.seen == ["c"]
    assert row["reason"] == "crashed" and Path(row["source"]).name == "b.wav"
    assert row["detail"].startswith("2 processes died of it")
    (named,) = (tmp_path / "out" / ".done").glob("*.tries")
    assert f"delete .done/{named.name} to have it tried again" in row["detail"]
    named.unlink()
    assert crashed(tmp_path, command) == [] and Recorder.seen == ["b"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_request_to_stop_counts_as_no_kill(tmp_path: Path, command: list[str], number: int) -> None:
    assert ended_by(number, command) == 128 + number
    assert tries(tmp_path) == []
    assert len(list((tmp_path / "out" / ".done").glob("*.json"))) == 1  # a is done


def test_an_interrupt_counts_as_no_kill(tmp_path: Path, command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(Recorder):
        def process(self, source: process.Source) -> dict[str, Any]:
            raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(process, "Recorder", Interrupted)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            main(command)
        assert tries(tmp_path) == []
    assert signal.getsignal(signal.SIGTERM) is before
    monkeypatch.setattr(process, "Recorder", Recorder)
    assert crashed(tmp_path, command) == [] and Recorder.seen == ["a", "b", "c"]
