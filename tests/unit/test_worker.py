"""What a worker runs, and the traceback a user gets to see."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest

from keepstep import current
from keepstep.config import LaunchConfig
from keepstep.engines.base import Launch, Outcome
from keepstep.engines.inprocess import InProcess
from keepstep.errors import ConfigError, ScriptRefused
from keepstep.failure import WorkerFailure
from keepstep.folder import RunFolder
from keepstep.job import JOB, PICKLED, Job, Target
from keepstep.observe.recovery import Death
from keepstep.worker import execute, user_traceback


@pytest.fixture(autouse=True)
def _own_interpreter_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Scripts and modules of these tests leave nothing in sys."""
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    modules = set(sys.modules)
    yield
    for name in set(sys.modules) - modules:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


def script(folder: Path, text: str, name: str = "train.py") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def test_a_target_goes_to_the_workers_as_text() -> None:
    target = Target("train.py", ("--lr", "1e-3", "é"))
    assert Target.from_json(target.to_json()) == target


@pytest.mark.parametrize(
    ("what", "is_script", "is_pickled"),
    [
        ("train.py", True, False),
        ("dir:with/colon.py", True, False),
        ("train", True, False),
        ("package.module:function", False, False),
        (f"/tmp/launch:train{PICKLED}", False, True),
    ],
)
def test_what_a_target_is(what: str, is_script: bool, is_pickled: bool) -> None:
    target = Target(what)
    assert (target.is_script, target.is_pickled) == (is_script, is_pickled)


def test_a_script_that_is_not_there_is_answered_with_those_that_are(tmp_path: Path) -> None:
    script(tmp_path, "", "train.py")
    script(tmp_path, "", "model.py")
    with pytest.raises(ConfigError, match=r"there is no script .*/tarin.py; there are model.py, train.py"):
        Target(str(tmp_path / "tarin.py")).check()
    with pytest.raises(ConfigError, match=r"there is no script no/such.py$"):
        Target("no/such.py").check()


def test_a_folder_is_answered_with_the_script_in_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is a folder; give the script in it, as .*/train.py"):
        Target(str(tmp_path)).check()


def test_a_target_that_is_there_is_fine(tmp_path: Path) -> None:
    Target(script(tmp_path, "")).check()
    Target("package.module:function").check()


def test_a_script_runs_as_python_would_run_it(tmp_path: Path) -> None:
    (tmp_path / "beside_it.py").write_text("value = 41")
    text = """
import pathlib, sys
from beside_it import value
pathlib.Path(sys.argv[1]).write_text(f"{__name__} {value + 1} {sys.argv[0]} {sys.argv[2:]} {__file__}")
"""
    path = script(tmp_path, text)
    before = list(sys.path)
    execute(Target(path, (str(tmp_path / "out"), "--lr", "1")))
    assert (tmp_path / "out").read_text() == f"__main__ 42 {path} ['--lr', '1'] {path}"
    assert sys.path == before


def test_a_function_of_a_module_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "of_users.py").write_text("import sys\ndef train():\n    return sys.argv[1:]\n")
    assert execute(Target("of_users:train", ("--lr", "1"))) == ["--lr", "1"]


def test_a_pickled_function_is_called(tmp_path: Path) -> None:
    captured = 41
    path = tmp_path / f"launch:train{PICKLED}"
    path.write_bytes(cloudpickle.dumps(lambda: captured + 1))
    assert execute(Target(str(path))) == 42


def test_a_function_at_hand_is_called_without_a_pickle() -> None:
    assert execute(Target("launch:train", function=lambda: 42)) == 42


def test_a_module_that_is_not_there_is_said_so() -> None:
    with pytest.raises(
        ConfigError, match=r"there is no module no_such.module; give a script or package.module:function"
    ):
        execute(Target("no_such.module:train"))


def test_a_function_that_is_not_there_is_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "of_others.py").write_text("value = 3\n")
    for name in ("train", "value", ""):
        with pytest.raises(ConfigError, match=f"module of_others has no function '{name}'"):
            execute(Target(f"of_others:{name}"))


@pytest.mark.parametrize(
    ("module", "missing"), [("mine", "not_installed"), ("trainer", "train_lib"), ("trainer", "trai")]
)
def test_a_package_that_the_module_lacks_is_named_not_the_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, missing: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / f"{module}.py").write_text(f"import {missing}\ndef train(): ...\n")
    with pytest.raises(ModuleNotFoundError, match=missing):
        execute(Target(f"{module}:train"))


FAILS = """
def inner():
    raise ValueError("bad sample")

inner()
"""


def frames(text: str) -> list[str]:
    """The functions in a traceback, outermost first."""
    return [line.rpartition(" in ")[2] for line in text.splitlines() if line.startswith("  File ")]


def test_a_traceback_begins_in_the_users_script(tmp_path: Path) -> None:
    path = script(tmp_path, FAILS)
    with pytest.raises(ValueError, match="bad sample") as caught:
        execute(Target(path))
    text = user_traceback(caught.value.with_traceback(caught.tb.tb_next))
    assert frames(text) == ["<module>", "inner"]
    assert text.startswith("Traceback (most recent call last):")
    assert text.endswith("ValueError: bad sample")
    assert "worker.py" not in text and "runpy" not in text


def launch_in_process(target: Target, tmp_path: Path) -> tuple[Outcome, list[WorkerFailure]]:
    failures: list[WorkerFailure] = []

    def on_failure(failed: list[WorkerFailure], death: Death) -> bool:
        failures.extend(failed)
        return False

    nothing: Callable[[], None] = lambda: None  # noqa: E731
    folder = RunFolder(tmp_path, "a")
    launch = Launch(
        config=LaunchConfig(), target=target, device="cpu", folder=folder, before_attempt=nothing,
        on_failure=on_failure, watch=nothing, say=print, asked_to_stop=lambda: False, hearts=tmp_path,
    )  # fmt: skip
    return InProcess().run(launch), failures


@pytest.mark.parametrize("kind", ["script", "function"])
def test_a_traceback_of_an_in_process_run_begins_in_the_users_code(tmp_path: Path, kind: str) -> None:
    def train() -> None:
        raise ValueError("bad sample")

    target = Target(script(tmp_path, FAILS)) if kind == "script" else Target("launch:train", function=train)
    outcome, (failure,) = launch_in_process(target, tmp_path)
    assert outcome is Outcome.FAILED
    assert frames(failure.traceback) == (["<module>", "inner"] if kind == "script" else ["train"])


def test_a_traceback_keeps_the_first_cause(tmp_path: Path) -> None:
    text = "try:\n    int('x')\nexcept ValueError as error:\n    raise RuntimeError('second') from error\n"
    with pytest.raises(RuntimeError, match="second") as caught:
        execute(Target(script(tmp_path, text)))
    shown = user_traceback(caught.value)
    assert "ValueError: invalid literal" in shown and shown.endswith("RuntimeError: second")


def test_an_error_of_keepsteps_own_keeps_its_traceback() -> None:
    def raised() -> BaseException:
        try:
            execute(Target("no_such_module:train"))
        except ConfigError as error:
            return error.with_traceback(error.__traceback__.tb_next if error.__traceback__ else None)
        raise AssertionError

    text = user_traceback(raised())
    assert text.endswith("give a script or package.module:function")


def test_a_syntax_error_shows_where_it_is(tmp_path: Path) -> None:
    path = script(tmp_path, "x = (\n")
    with pytest.raises(SyntaxError) as caught:
        execute(Target(path))
    text = user_traceback(caught.value)
    assert f'File "{path}", line 1' in text and "SyntaxError" in text


def test_what_a_script_leaves_with_is_not_swallowed(tmp_path: Path) -> None:
    def leave(code: Any) -> Any:
        with pytest.raises(SystemExit) as caught:
            execute(Target(script(tmp_path, f"import sys; sys.exit({code!r})")))
        return caught.value.code

    assert [leave(code) for code in (0, 3, None)] == [0, 3, None]


def test_words_that_a_script_leaves_with_before_its_first_step_are_all_that_is_shown(tmp_path: Path) -> None:
    with pytest.raises(ScriptRefused, match=r"^data\.csv has no rows$"):
        execute(Target(script(tmp_path, "import sys; sys.exit('data.csv has no rows')")))


def test_words_in_the_middle_of_training_are_a_failure_like_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaving = Target(script(tmp_path, "import sys; sys.exit('the data server is gone')"))
    restored = SimpleNamespace(has_begun=False, step=500)  # what it said of itself when the loop's body left
    monkeypatch.setattr(current, "_current", restored)
    with pytest.raises(SystemExit):
        execute(leaving)
    monkeypatch.setattr(current, "_current", None)  # while it loads, after an attempt that made steps
    job = Job(settings={}, name="run", hearts=str(tmp_path), in_process=False, replay_until=500)
    monkeypatch.setenv(JOB, job.to_json())
    with pytest.raises(SystemExit):
        execute(leaving)
