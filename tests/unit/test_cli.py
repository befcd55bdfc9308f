"""The command line: which flags there are, and what becomes of them. The list of flags is pinned."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import keepstep
from keepstep import cli, supervisor
from keepstep.config import SETTINGS
from keepstep.engines import Outcome
from keepstep.errors import ConfigError
from keepstep.failure import WorkerFailure
from keepstep.job import Target
from keepstep.supervisor import Result


def subparsers() -> dict[str, argparse.ArgumentParser]:
    parser = cli._parser()
    (action,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return dict(action.choices)


def flags(parser: argparse.ArgumentParser) -> list[str]:
    return [option for action in parser._actions for option in action.option_strings if option not in ("-h", "--help")]


def test_the_list_of_commands_and_flags() -> None:
    """A new flag is a decision: it is made here, too."""
    assert {name: flags(parser) for name, parser in subparsers().items()} == {
        "run": [
            "--workers",
            "--engine",
            "--address",
            "--cpus-per-worker",
            "--gpus-per-worker",
            "--resources",
            "--ship",
            "--nodes",
            "--node-rank",
            "--rendezvous",
            "--max-failures",
            "--strategy",
            "--precision",
            "--compile",
            "--activation-checkpointing",
            "--cpu-offload",
            "--nvme-offload",
            "--deepspeed-config",
            "--device",
            "--deterministic",
            "--checkpoint-every",
            "--checkpoint-mode",
            "--keep",
            "--keep-best",
            "--name",
            "--storage",
            "--seed",
            "--sinks",
            "--hang-timeout",
        ],
        "tune": [
            "--space",
            "--metric",
            "--trials",
            "--method",
            "--grace",
            "--resume",
            *("--" + name.replace("_", "-") for name in SETTINGS),
        ],
        "verify": [
            "--kills",
            "--faults-seed",
            "--output",
            *("--" + name.replace("_", "-") for name in SETTINGS),
        ],
        "runs": ["--storage"],
        "show": ["--storage"],
        "checkpoints": ["--storage", "--verify"],
        "doctor": [],
        "demo": ["--storage"],
        "new": [],
        "workshop": ["--check", "--folder"],
        "export": [
            "--storage",
            "--checkpoint",
            "--format",
            "--model",
            "--dtype",
            "--strip-prefix",
            "--shard-size",
            "--output",
        ],
        "predict": [
            "--storage",
            "--data",
            "--output",
            "--with",
            "--checkpoint",
            "--model",
            "--keep",
            "--batch-size",
            "--workers",
            "--address",
            "--device",
        ],
    }


class Supervised:
    """Stands for `supervise`: notes what it was given."""

    def __init__(self, outcome: Outcome = Outcome.FINISHED, error: BaseException | None = None) -> None:
        self.outcome, self.error = outcome, error
        self.settings: dict[str, Any] = {}
        self.target = Target("")

    def __call__(self, settings: dict[str, Any], target: Target, began: float) -> Result:
        assert 0 <= time.time() - began < 3600, "since this process began"
        self.settings, self.target = settings, target
        if self.error is not None:
            raise self.error
        return Result(self.outcome, "name", Path(), 0, {}, [])


@pytest.fixture
def supervised(monkeypatch: pytest.MonkeyPatch) -> Supervised:
    fake = Supervised()
    monkeypatch.setattr(supervisor, "supervise", fake)
    return fake


def test_only_what_was_given_is_passed_on(supervised: Supervised) -> None:
    """What was left out is the script's `keepstep.start(...)` to say."""
    assert cli.main(["run", "train.py"]) == 0
    assert supervised.settings == {}
    assert supervised.target == Target("train.py", ())


def test_every_flag_reaches_its_setting(supervised: Supervised) -> None:
    values: dict[str, Any] = {}
    argv = ["run"]
    for name, field in SETTINGS.items():
        option = "--" + name.replace("_", "-")
        if isinstance(field.default, bool):
            values[name] = True
            argv.append(option)
            continue
        choices = field.metadata["choices"]
        number = 1.5 if name == "gpus_per_worker" else None  # whose default, none, does not say what it is
        numbers = {int: 7, float: 0.5}
        values[name] = choices[-1] if choices else number or numbers.get(type(field.default), "text")
        argv += [option, str(values[name])]
    cli.main([*argv, "train.py"])
    assert supervised.settings == values
    assert all(type(supervised.settings[name]) is type(value) for name, value in values.items())


@pytest.mark.parametrize(
    ("argv", "arguments"),
    [
        (["train.py", "--lr", "1e-3"], ("--lr", "1e-3")),
        (["--workers", "2", "train.py", "--workers", "9", "--name", "mine"], ("--workers", "9", "--name", "mine")),
        (["train.py", "-h"], ("-h",)),
        (["train.py", "a b", "", "--x=1", "-1"], ("a b", "", "--x=1", "-1")),
        (["train.py", "--", "--lr", "1"], ("--", "--lr", "1")),
        (["train.py", "x", "--", "y"], ("x", "--", "y")),
    ],
)
def test_what_stands_after_the_script_is_the_scripts_untouched(
    supervised: Supervised, argv: list[str], arguments: tuple[str, ...]
) -> None:
    cli.main(["run", *argv])
    assert supervised.target == Target("train.py", arguments)
    assert supervised.settings == ({"workers": 2} if argv[0] == "--workers" else {})


def test_bad_input_that_a_worker_found_is_bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    mistake, crash = WorkerFailure(0, "DataError", user_error=True), WorkerFailure(1, "SIGKILL")

    def ends_with(*failures: WorkerFailure) -> int:
        result = Result(Outcome.FAILED, "name", Path(), 0, {}, list(failures))
        monkeypatch.setattr(supervisor, "supervise", lambda *_, **__: result)
        return cli.main(["run", "train.py"])

    assert ends_with(mistake, crash) == 2
    assert ends_with(crash, mistake) == 1


@pytest.mark.parametrize(("outcome", "code"), [(Outcome.FINISHED, 0), (Outcome.STOPPED, 75), (Outcome.FAILED, 1)])
def test_exit_codes(monkeypatch: pytest.MonkeyPatch, outcome: Outcome, code: int) -> None:
    monkeypatch.setattr(supervisor, "supervise", Supervised(outcome))
    assert cli.main(["run", "train.py"]) == code


def test_a_mistake_is_one_line_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(supervisor, "supervise", Supervised(error=ConfigError("--keep is 0; at least 1")))
    assert cli.main(["run", "train.py"]) == 2
    assert capsys.readouterr().err == "keepstep: configuration: --keep is 0; at least 1\n"


def test_a_second_ctrl_c_ends_with_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(supervisor, "supervise", Supervised(error=KeyboardInterrupt()))
    assert cli.main(["run", "train.py"]) == 130
    assert "stopped at once; what was saved is kept" in capsys.readouterr().err


def test_an_error_of_our_own_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "supervise", Supervised(error=ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        cli.main(["run", "train.py"])


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        ([], "required: COMMAND"),
        (["run"], "required: SCRIPT"),
        (["train"], "invalid choice: 'train'"),
        (["run", "--seed", "two", "train.py"], "invalid int value: 'two'"),
        (["run", "--strategy", "dp", "train.py"], "invalid choice: 'dp'"),
        (["run", "--wrokers", "2", "train.py"], "--wrokers"),
        (["run", "--work", "2", "train.py"], "--work"),
        (["show"], "required: name"),
        (["export", "vit", "--format", "onnx"], "invalid choice: 'onnx'"),
    ],
)
def test_what_cannot_be_parsed_is_refused(
    supervised: Supervised, capsys: pytest.CaptureFixture[str], argv: list[str], complaint: str
) -> None:
    """A flag that is cut short too: it would mean another one when flags are added."""
    with pytest.raises(SystemExit) as leaving:
        cli.main(argv)
    assert leaving.value.code == 2
    assert complaint in capsys.readouterr().err


def test_help_tells_every_setting_and_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        cli.main(["run", "--help"])
    assert leaving.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "keepstep run [options] SCRIPT" in text
    for name, field in SETTINGS.items():
        assert "--" + name.replace("_", "-") in text
        assert field.metadata["help"] in text
    assert "(default: 5min)" in text and "(default: False)" not in text and "(default: None)" not in text


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"keepstep {keepstep.__version__}\n"


def test_commands_get_their_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []

    def note(name: str) -> Any:
        return lambda *args: calls.append((name, *args)) or 0

    monkeypatch.setattr("keepstep.show.print_runs", note("runs"))
    monkeypatch.setattr("keepstep.show.print_run", note("show"))
    monkeypatch.setattr("keepstep.checkpoints.print_checkpoints", note("checkpoints"))
    monkeypatch.setattr("keepstep.doctor.print_report", note("doctor"))
    monkeypatch.setattr("keepstep.demo.demo", note("demo"))
    monkeypatch.setattr("keepstep.recipes.copy_recipe", note("new"))
    assert cli.main(["runs", "--storage", "s"]) == 0
    cli.main(["show", "vit"])
    cli.main(["checkpoints", "vit"])
    cli.main(["checkpoints", "vit", "--verify"])
    cli.main(["doctor"])
    cli.main(["demo"])
    cli.main(["new", "gpt"])
    cli.main(["new", "gpt", "mine"])
    assert calls == [
        ("runs", "s"),
        ("show", "runs", "vit"),
        ("checkpoints", "runs", "vit", False),
        ("checkpoints", "runs", "vit", True),
        ("doctor",),
        ("demo", Path("runs")),
        ("new", "gpt", Path("gpt")),
        ("new", "gpt", Path("mine")),
    ]


def test_export_of_a_run_that_is_not_there_is_a_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["export", "vit", "--storage", str(tmp_path)]) == 2
    assert "keepstep: run folder: there is no run 'vit'" in capsys.readouterr().err


def test_a_reader_that_went_away_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """`keepstep runs | head`."""

    def gone(storage: Path) -> int:
        raise BrokenPipeError

    monkeypatch.setattr("keepstep.show.print_runs", gone)
    monkeypatch.setattr(sys, "stderr", open("/dev/null", "w"))  # noqa: SIM115, it is closed by the command
    assert cli.main(["runs"]) == 0


def test_every_setting_is_a_flag() -> None:
    assert flags(subparsers()["run"]) == ["--" + name.replace("_", "-") for name in SETTINGS]
