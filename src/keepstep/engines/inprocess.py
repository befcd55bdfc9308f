"""One worker, in this very process: a debugger and a notebook work."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from keepstep import current
from keepstep.engines.base import Launch, Outcome
from keepstep.engines.requests import obey
from keepstep.errors import KeepstepError, Stopped
from keepstep.failure import WorkerFailure
from keepstep.observe.hang import Request
from keepstep.observe.recovery import Death
from keepstep.worker import execute, failed_step, user_traceback

_WATCH_S = 0.5
_HUNG_SIGNAL = signal.SIGRTMIN + 7 if sys.platform == "linux" else signal.SIGUSR1


class InProcess:
    """Runs the script here; after an error, again, from the newest checkpoint."""

    def run(self, launch: Launch) -> Outcome:
        while True:
            launch.before_attempt()
            try:
                with _watched(launch):
                    return self._attempt(launch)
            except Exception as error:
                failure = _report(error)
                if not launch.on_failure([failure], Death(failure.moment, failure.moment, time.time())):
                    return Outcome.FAILED

    def _attempt(self, launch: Launch) -> Outcome:
        try:
            execute(launch.target)
        except Stopped:
            current.end()
            return Outcome.STOPPED
        except SystemExit as leaving:
            if leaving.code not in (0, None):
                raise RuntimeError(f"the script left with exit code {leaving.code}") from leaving
        current.end()
        return Outcome.FINISHED


class _Hung(Exception):
    """Raised within the script, wherever it stands still."""


@contextmanager
def _watched(launch: Launch) -> Iterator[None]:
    """The script has the main thread: another one looks after it meanwhile."""
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(_WATCH_S):
            request = launch.watch()
            if request is Request.LOOK:
                obey(request, launch.hearts)
            elif request is Request.ABORT and not is_over.is_set():
                os.kill(os.getpid(), _HUNG_SIGNAL)  # wakes Python code; native code that waits for ever goes on so

    def raise_hung(*_: object) -> None:
        raise _Hung("no sign of life")

    if threading.current_thread() is not threading.main_thread():
        yield  # where no signal can be taken
        return
    before = signal.signal(_HUNG_SIGNAL, raise_hung)
    watcher = threading.Thread(target=watch, name="keepstep-watch", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        is_over.set()
        watcher.join()
        signal.signal(_HUNG_SIGNAL, before)


def _report(error: Exception) -> WorkerFailure:
    run = current.abandon()
    phase = "start" if run is None or not run.has_begun else "step"
    if run is not None:
        run.settle()
        run.close()
    return WorkerFailure(
        rank=0,
        cause=type(error).__name__,
        message=str(error),
        traceback=user_traceback(error),
        step=failed_step(run, error),
        phase=phase,
        moment=time.time(),
        user_error=isinstance(error, KeepstepError),
    )
