"""One trial: a Ray Tune trainable that holds a reservation, runs `keepstep run` within it, and reports its metric."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

import ray
from ray import tune

from keepstep.errors import EXIT_STOPPED, CheckpointError, RunFolderError
from keepstep.folder import RunFolder
from keepstep.tune.board import Reported
from keepstep.tune.child import PARENT
from keepstep.tune.exploit import copied_step, copy_newest
from keepstep.tune.journal import FAILED, FINISHED, STOPPED
from keepstep.tune.order import Order
from keepstep.tune.reports import Reports

_POLL_S, _LOOK_S = 0.1, 0.5
_HELD_FOR_S = 300.0
"""How long an earlier process of the run may take to save and leave."""


class Trial(tune.Trainable):  # type: ignore[misc]
    """All that must last is in the run folder: a trial that is paused, moved or killed goes on as its run does."""

    def setup(self, config: dict[str, Any]) -> None:
        self._order = Order.of(config)
        self._folder = RunFolder(self._order.storage, self._order.run)
        self._board = ray.get_actor(self._order.board)
        self._child: subprocess.Popen[bytes] | None = None
        self._looked = 0.0
        self._stopping = False

    def step(self) -> dict[str, Any]:
        """Waits for the run's next report, or its end."""
        if self._child is None:
            if ray.get(self._board.look.remote(self._order.number, 0)):
                return _end(STOPPED)
            try:
                self._prepare()
            except (CheckpointError, RunFolderError) as error:
                return _end(FAILED, str(error))
            self._child = self._launch()
        while True:
            code = self._child.poll()  # before the file is read: what is written until then is found
            report = self._reports.next()
            if report is not None:
                return self._report(*report)
            if code is not None:
                return self._ended(code)
            self._look()
            time.sleep(_POLL_S)

    def _prepare(self) -> None:
        self._wait_until_free()
        reported: Reported = ray.get(self._board.reported.remote(self._order.number))
        order, after_step = 0, reported.step
        if copy := self._order.copy:
            order = copy.order
            step = copied_step(self._folder, copy.order)
            if step is None:
                step = copy_newest(RunFolder(self._order.storage, copy.donor), self._folder, copy)
            if reported.order != copy.order:
                after_step = step - 1  # the validation after that step, which the copy makes too, says what it is now
        self._reported = Reported(reported.reports, after_step, order)
        self._reports = Reports(self._folder.metrics, self._order.metric, after_step)

    def _wait_until_free(self) -> None:
        until = time.monotonic() + _HELD_FOR_S
        while self._folder.is_held():
            if time.monotonic() > until:
                raise RunFolderError(
                    f"run '{self._order.run}' has been running for {_HELD_FOR_S:.0f} s, in a process that is not this "
                    "search's; stop that one, then go on with --resume"
                )
            time.sleep(_POLL_S)

    def _launch(self) -> subprocess.Popen[bytes]:
        self._folder.create()
        environment = {**os.environ, PARENT: str(os.getpid()), "OMP_NUM_THREADS": str(self._order.threads)}
        command = [sys.executable, "-m", "keepstep.tune.child", *self._order.words]
        with (self._folder.logs / "trial.txt").open("ab") as log:
            return subprocess.Popen(
                command, cwd=self._order.folder, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def _report(self, step: int, value: float) -> dict[str, Any]:
        self._reported = Reported(self._reported.reports + 1, step, self._reported.order)
        ray.get(self._board.report.remote(self._order.number, self._reported))
        done = self._reported
        return {"value": value, "reports": done.reports, "at_step": step, "order": done.order}

    def _look(self) -> None:
        now = time.monotonic()
        if now - self._looked < _LOOK_S or self._child is None:
            return
        self._looked = now
        if ray.get(self._board.look.remote(self._order.number, self._reports.step)) and not self._stopping:
            self._stopping = True
            self._child.send_signal(signal.SIGTERM)

    def _ended(self, code: int) -> dict[str, Any]:
        if code == 0:
            return _end(FINISHED, step=self._reports.step)
        if code == EXIT_STOPPED:
            return _end(STOPPED, step=self._reports.step)
        return _end(FAILED, self._why(code), self._reports.step)

    def _why(self, code: int) -> str:
        for event in reversed(self._folder.read_events()):
            if event["event"] == "failed":
                first = event["failures"][0]
                return f"{first['cause']} {first['message']}".strip()
        lines = (self._folder.logs / "trial.txt").read_text(errors="replace").splitlines()
        return lines[-1] if lines else f"exit code {code}"

    def cleanup(self) -> None:
        """The search is done with this trial, for good or for now: its run saves and stops."""
        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(signal.SIGTERM)
            self._child.wait()

    def save_checkpoint(self, checkpoint_dir: str) -> dict[str, Any]:
        return {"run": self._order.run}  # Tune wants one; the run has its own

    def load_checkpoint(self, checkpoint: dict[str, Any] | None) -> None:
        pass


def _end(status: str, reason: str = "", step: int = 0) -> dict[str, Any]:
    return {"done": True, "status": status, "reason": reason, "at_step": step}
