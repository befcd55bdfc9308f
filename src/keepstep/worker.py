"""A worker's life: its log, the user's script or function, and what it leaves behind when that fails."""

from __future__ import annotations

import importlib
import json
import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from keepstep import current
from keepstep.errors import ConfigError, KeepstepError, NotFinite, ScriptRefused, Stopped
from keepstep.fingerprints.switch import watch_calls
from keepstep.imports import script_begins
from keepstep.job import ERROR_FILE, LOGS, TARGET, Target
from keepstep.lifeline import die_with_parent
from keepstep.run import Run

FAILURE_MARK = "keepstep: this worker failed:"
"""Stands in a log before the traceback, which the supervisor shows in its own report."""


def execute(target: Target) -> Any:
    """Runs the target in this process, as `python` would; words that it leaves with before its first step are kept."""
    try:
        return _execute(target)
    except SystemExit as leaving:
        if isinstance(leaving.code, str) and not current.has_begun():
            raise ScriptRefused(leaving.code).with_traceback(leaving.__traceback__) from None
        raise


def _execute(target: Target) -> Any:
    if target.is_script:
        sys.argv = [target.what, *target.arguments]
        sys.path.insert(0, str(Path(target.what).resolve().parent))
        try:
            runpy.run_path(target.what, run_name="__main__")
        finally:
            sys.path.pop(0)
        return None
    return _function(target)()


def _function(target: Target) -> Callable[[], Any]:
    if target.function is not None:
        return target.function
    if target.is_pickled:
        import cloudpickle

        function: Callable[[], Any] = cloudpickle.loads(Path(target.what).read_bytes())
        return function
    sys.path.insert(0, os.getcwd())
    sys.argv = [target.what, *target.arguments]
    module_name, _, name = target.what.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(f"there is no module {module_name}; give a script or package.module:function") from None
    if not callable(getattr(module, name, None)):
        raise ConfigError(f"module {module_name} has no function {name!r}")
    found: Callable[[], Any] = getattr(module, name)
    return found


def main() -> None:
    """The life of a worker that an engine started in a process of its own."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the supervisor, who tells everybody
    rank = int(os.environ["RANK"])
    _log_to(Path(os.environ[LOGS]) / f"rank_{rank}.txt")
    try:
        watch_calls(rank)
        try:
            script_begins()
            execute(Target.from_json(os.environ[TARGET]))
        except Stopped:
            pass
        except SystemExit as leaving:
            if leaving.code not in (0, None):
                raise
        current.end()
    except BaseException as error:
        _fail(error)
    current.leave_with(0)


def _fail(error: BaseException) -> None:
    """Leaves a report and goes at once: waiting for a process group with a dead member can take forever."""
    run = current.abandon()
    text = user_traceback(error)
    print(f"{FAILURE_MARK}\n{text}", file=sys.stderr, flush=True)
    report = {
        "cause": type(error).__name__ if not isinstance(error, SystemExit) else f"exit code {error.code}",
        "message": str(error),
        "traceback": text,
        "step": failed_step(run, error),
        "time": time.time(),
        "user_error": isinstance(error, KeepstepError),
    }
    path = os.environ.get(ERROR_FILE)
    if path:
        # torchelastic's own format, with our fields beside its.
        extra = {"py_callstack": text, "timestamp": str(int(time.time())), "keepstep": report}
        # Whole or not at all: torchelastic stumbles over half a report.
        half = Path(f"{path}.writing")
        half.write_text(json.dumps({"message": {"message": str(error), "extraInfo": extra}}))
        half.replace(path)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def failed_step(run: Run | None, error: BaseException) -> int:
    """The step at which a failed run was."""
    if run is None:
        return 0
    if isinstance(error, NotFinite):  # which was seen later
        return error.step - 1
    return run.step if run.left_at is None else run.left_at


def user_traceback(error: BaseException) -> str:
    """The traceback from the user's code on: how keepstep got there is of no use to them."""
    frames = traceback.TracebackException.from_exception(error)
    kept = list(frames.stack)
    ours = str(Path(__file__).parent)
    for number, frame in enumerate(kept):
        if not frame.filename.startswith(("<frozen", ours)):
            frames.stack = traceback.StackSummary.from_list(kept[number:])
            break
    return "".join(frames.format()).rstrip()


def _log_to(path: Path) -> None:
    """Everything that this process prints, native code included, goes to its log, after what is there already."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
