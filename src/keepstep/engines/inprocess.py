"""One worker, in this very process: a debugger and a notebook work."""

from __future__ import annotations

import time

from keepstep import current
from keepstep.engines.base import Launch, Outcome
from keepstep.errors import KeepstepError, Stopped
from keepstep.failure import WorkerFailure
from keepstep.observe.recovery import Loss
from keepstep.worker import execute, failed_step, user_traceback


class InProcess:
    """Runs the script here; after an error, again, from the newest checkpoint."""

    def run(self, launch: Launch) -> Outcome:
        while True:
            launch.before_attempt()
            try:
                return self._attempt(launch)
            except Exception as error:
                failure = _report(error)
                if not launch.on_failure([failure], Loss(failure.moment, failure.moment, time.time())):
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
        step=failed_step(run),
        phase=phase,
        moment=time.time(),
        user_error=isinstance(error, KeepstepError),
    )
