"""The run of this process: made by `start`, ended when the script ends."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from types import TracebackType
from typing import Any, NoReturn

from keepstep.context import Context
from keepstep.errors import EXIT_STOPPED
from keepstep.job import Job
from keepstep.run import Run

_current: Run | None = None
_failed = False
_exit_code: int | None = None
"""What to leave with at once, when all other exit handlers have run."""


def start(**settings: Any) -> Run:
    """Begins, or resumes, a run in this worker.

    Settings are those of the command line (`keepstep run --help`), with underscores: `start(name="vit", keep=5)`.
    What is given on the command line wins.
    """
    global _current
    if _current is not None:
        end()
    run = Run(Context.create(settings))
    _current = run
    if Job.from_environment() is None:
        _end_with_the_script()
    return run


def end() -> None:
    """Ends the current run well, if there is one: the script is through."""
    global _current
    run, _current = _current, None
    if run is not None and not run.stopped:
        run.finish()
    elif run is not None:
        run.close()


def has_begun() -> bool:
    """Whether the current run has come to its steps, now or in an earlier attempt."""
    job = Job.from_environment()
    if job is not None and job.replay_until > 0:
        return True
    return _current is not None and (_current.has_begun or _current.step > 0)


def abandon() -> Run | None:
    """Lets go of the current run as it is: the script failed. Returns it, for the report."""
    global _current
    run, _current = _current, None
    return run


def _end_with_the_script() -> None:
    """A plain `python train.py` or `torchrun train.py` has nobody who waits for its end."""
    previous = sys.excepthook

    def note_failure(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        global _failed
        _failed = True
        previous(kind, error, trace)

    leave = sys.exit

    def note_exit(code: Any = None) -> NoReturn:
        """`sys.exit(3)` passes no excepthook, and is no good end either."""
        global _failed
        _failed = _failed or code not in (0, None)
        leave(code)

    sys.excepthook, sys.exit = note_failure, note_exit
    atexit.unregister(_at_exit)
    atexit.register(_at_exit)


def _at_exit() -> None:
    run = _current
    if _failed:
        abandon()
        if run is not None and run.world_size == 1:
            run.settle()
        if run is not None:
            run.tell_failure()
        return
    end()
    if run is not None and run.world_size > 1:
        leave_with(EXIT_STOPPED if run.stopped else 0)


def leave_with(code: int) -> None:
    """Makes this process leave with `code` as soon as all other exit handlers have run."""
    global _exit_code
    _exit_code = code


def _leave_at_once() -> None:
    """The last of the exit handlers: leaves without taking the interpreter down.

    torch's threads now and then abort in it, with or without keepstep, and torchrun would count a worker that has
    done its work as failed.
    """
    if _exit_code is not None:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_exit_code)


atexit.register(_leave_at_once)  # as early as it can be: handlers run in the reverse order
