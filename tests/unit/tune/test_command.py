"""`keepstep tune`: what is refused before anything starts, what is printed, exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from keepstep import cli
from keepstep.errors import ConfigError, RunFolderError
from keepstep.job import Target
from keepstep.tune import command
from keepstep.tune.journal import FINISHED, STOPPED
from keepstep.tune.search import Options

Drive = Callable[..., bool]


@pytest.fixture
def script(tmp_path: Path) -> Target:
    (tmp_path / "train.py").touch()
    return Target(str(tmp_path / "train.py"))


def go(script: Target, storage: Path, space: str = "lr=grid(1,2)", **options: Any) -> int:
    settings = {"name": "find", "storage": str(storage)}
    return command.tune(settings, script, Options((space,), "acc:max", **options))


def drives(status: str, stopped: bool = False) -> Drive:
    """Stands for Ray Tune: every trial reports its number."""

    def drive(search: Any, records: Any, journal: Any, *_: Any) -> bool:
        for number, record in records.items():
            if not record.is_over:
                record.take(journal.write("report", number, step=4, value=number, order=0))
                record.take(journal.write("end", number, status=status, reason="", step=4))
        return stopped

    return drive


def test_a_search_that_ends(script: Target, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(command, "_drive", drives(FINISHED))
    assert go(script, tmp_path) == 0
    printed = capsys.readouterr().out
    assert printed.index("find-0001") < printed.index("find-0000"), "best first"
    assert f"keepstep run --name find-best --storage {tmp_path} {script.what} --lr 2" in printed
    summary = json.loads((tmp_path / "find" / "tune.json").read_text())
    assert summary["best"] == "find-0001" and [row["status"] for row in summary["trials"]] == ["finished"] * 2
    assert not (tmp_path / "find" / "logs").exists()


def test_a_search_that_is_stopped_goes_on_and_may_be_made_longer(
    script: Target, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.setattr(command, "_drive", drives(STOPPED, stopped=True))
    assert go(script, tmp_path) == 75
    monkeypatch.setattr(command, "_drive", drives(FINISHED))
    assert go(script, tmp_path, resume=True, trials=3) == 0
    assert len(json.loads((tmp_path / "find" / "tune.json").read_text())["trials"]) == 3
    monkeypatch.setattr(command, "_drive", None)
    assert go(script, tmp_path, resume=True, trials=3) == 0, "nothing is left to do"


def test_no_report_at_all_is_a_failure_that_says_what_there_is(
    script: Target, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    def drive(*_: Any) -> bool:
        (tmp_path / "find-0000").mkdir()
        (tmp_path / "find-0000" / "metrics.jsonl").write_text('{"step": 1, "epoch": 0, "accuracy": 0.5}\n')
        return False

    monkeypatch.setattr(command, "_drive", drive)
    assert go(script, tmp_path) == 1
    assert "find-0000 has logged accuracy, and printed what is in" in capsys.readouterr().out


def test_a_search_that_never_began_is_no_hindrance(script: Target, tmp_path: Path, monkeypatch: Any) -> None:
    def no_room(*_: Any) -> bool:
        raise ConfigError("no room")

    monkeypatch.setattr(command, "_drive", no_room)
    with pytest.raises(ConfigError, match="no room"):
        go(script, tmp_path)
    monkeypatch.setattr(command, "_drive", drives(FINISHED))
    assert go(script, tmp_path, space="lr=grid(1,3)") == 0


def test_what_is_refused(script: Target, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(command, "_drive", drives(FINISHED))
    with pytest.raises(RunFolderError, match="there is no search 'find'"):
        go(script, tmp_path, resume=True)
    assert not (tmp_path / "find").exists()
    (tmp_path / "find-0001").mkdir()
    with pytest.raises(RunFolderError, match="there is a run 'find-0001'"):
        go(script, tmp_path)
    (tmp_path / "find-0001").rmdir()
    go(script, tmp_path)
    with pytest.raises(RunFolderError, match=r"is there already.*--resume goes on"):
        go(script, tmp_path)
    with pytest.raises(ConfigError, match=r"begun with space \[.lr=grid\(1,2\).\].*only --trials may"):
        go(script, tmp_path, space="lr=grid(1,3)", resume=True)
    with pytest.raises(ConfigError, match="--resume needs --name"):
        command.tune({}, script, Options(("lr=grid(1)",), "acc:max", resume=True))
    with pytest.raises(ConfigError, match="there is no script"):
        go(Target(str(tmp_path / "none.py")), tmp_path)
    (tmp_path / "find" / "config.json").touch()
    with pytest.raises(RunFolderError, match="is a run, not a search"):
        go(script, tmp_path, resume=True)


def test_what_stands_after_the_script_is_the_scripts(monkeypatch: Any) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(command, "tune", lambda *given: asked.extend(given) or 0)
    own = ["--workers", "2", "--space", "lr=grid(1)", "--resume", "--space", "n=choice(a,b)", "--metric", "acc:max"]
    assert cli.main(["tune", *own, "--grace", "3", "train.py", "--space", "mine", "--resume"]) == 0
    settings, target, options = asked
    assert settings == {"workers": 2}
    assert target == Target("train.py", ("--space", "mine", "--resume"))
    assert options == Options(["lr=grid(1)", "n=choice(a,b)"], "acc:max", None, "asha", 3, True)
