"""Carries out a plan of faults on a run, with real signals, and notes what came of each."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from keepstep.errors import EXIT_FAILED, EXIT_STOPPED
from keepstep.verify.launch import Command, Launched
from keepstep.verify.plan import SAVE, STOP, Fault
from keepstep.verify.watch import Watch

_NEAR_S, _FAR_S = 0.0005, 0.005
_AFTER_KILL_S = 0.05
"""How long a process that was killed may take to be gone."""


@dataclass(frozen=True)
class Injected:
    """A fault that was carried out, and what it cost."""

    fault: Fault
    run: str
    at_step: int
    """The furthest step that was complete."""
    time: float
    phase: str = ""
    resumed_from: int | None = None
    recovered_s: float | None = None
    """From the death to the first step that had not been made before."""

    @property
    def steps_lost(self) -> int | None:
        return None if self.resumed_from is None else max(0, self.at_step - self.resumed_from)


@dataclass(frozen=True)
class Injection:
    """How a run with faults ended."""

    code: int
    injected: list[Injected]
    left: list[Fault]
    """What the run was over too soon for."""
    problem: str = ""
    """Why it had to be ended, if so."""


class Injector:
    """One run, launched as often as it is stopped."""

    def __init__(
        self, command: Command, faults: list[Fault], step_s: float, stall_s: float, on_stop: Callable[[], None]
    ) -> None:
        """`step_s`: what a step takes; `stall_s`: how long to wait for any sign of progress; `on_stop` is called when
        the run has saved and left, before it goes on."""
        self._command, self._step_s, self._stall_s, self._on_stop = command, step_s, stall_s, on_stop
        self._left = list(faults)
        self._watch = Watch(command.folder.path)
        self._injected: list[Injected] = []
        self._floor = 0
        """The furthest step before the newest fault: until there is a new one, the run has not recovered."""
        self._starts_before = 0
        self._progress: tuple[Any, float] = (None, time.monotonic())
        self._problem = ""

    def run(self) -> Injection:
        """To its end."""
        while True:
            with Launched(self._command) as launched:
                code = self._attend(launched)
            was_asked = bool(self._injected) and self._injected[-1].fault.kind == STOP
            if code != EXIT_STOPPED or not was_asked:
                return self._ended(code)
            self._note_death()
            self._on_stop()

    def _attend(self, launched: Launched) -> int:
        asked = False
        while (code := launched.poll()) is None:
            self._watch.look()
            self._note_recovery()
            fault = self._left[0] if self._left and self._is_recovered and not asked else None
            if fault is not None and self._is_due(fault) and self._carry_out(fault, launched):
                asked = fault.kind == STOP
                self._left.pop(0)
            if self._is_stalled():
                return EXIT_FAILED  # whoever launched it ends it
            is_near = fault is not None and self._watch.step >= fault.step - 2
            time.sleep(_NEAR_S if is_near else _FAR_S)
        self._watch.look()
        self._note_recovery()
        return code

    @property
    def _is_recovered(self) -> bool:
        return self._watch.starts > self._starts_before and self._watch.step > self._floor

    def _is_due(self, fault: Fault) -> bool:
        if fault.kind == SAVE:
            return any(step >= fault.step for step in self._watch.being_saved())
        return self._watch.step >= fault.step

    def _carry_out(self, fault: Fault, launched: Launched) -> bool:
        """Whether it hit what it was meant to."""
        saving = {step for step in self._watch.being_saved() if step >= fault.step} if fault.kind == SAVE else set()
        if fault.kind != SAVE:
            time.sleep(fault.delay * self._step_s)
        starts, pids = self._watch.starts, self._watch.pids(fault.ranks)
        moment = time.time()
        if fault.kind == STOP:
            launched.ask_to_stop()
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_AFTER_KILL_S if pids else 0.0)
        self._watch.look()
        phase = ""
        if fault.kind == SAVE:
            unfinished = saving & self._watch.being_saved()
            phase = f"save of step {min(unfinished)}" if unfinished else ""
        self._floor, self._starts_before = self._watch.furthest, starts
        self._injected.append(Injected(fault, self._command.folder.name, self._floor, moment, phase))
        if fault.kind == SAVE and not phase:
            # It had been committed by then: a kill all the same, but not the one that was asked for.
            self._injected[-1] = replace(self._injected[-1], phase="just after a save")
            return False
        return True

    def _note_death(self) -> None:
        """A run that was asked to stop has gone on until it saved."""
        self._floor = self._watch.furthest
        self._injected[-1] = replace(self._injected[-1], at_step=self._floor, time=time.time())

    def _note_recovery(self) -> None:
        if self._injected and self._injected[-1].recovered_s is None and self._is_recovered:
            seconds = time.time() - self._injected[-1].time
            self._injected[-1] = replace(self._injected[-1], recovered_s=round(seconds, 2))

    def _is_stalled(self) -> bool:
        now = (self._watch.starts, self._watch.furthest)
        if now != self._progress[0]:
            self._progress = (now, time.monotonic())
        elif time.monotonic() - self._progress[1] > self._stall_s:
            after = f" after a fault ({self._injected[-1].fault.kind})" if self._injected else ""
            self._problem = f"run {self._command.folder.name} made no step for {self._stall_s:.0f} s{after}"
        return bool(self._problem)

    def _ended(self, code: int) -> Injection:
        """Adds what the run's own events say: the phase that a worker died in, and where the run went on from."""
        events = self._command.folder.read_events()
        found, missed = [], []
        for number, injected in enumerate(self._injected):
            until = self._injected[number + 1].time if number + 1 < len(self._injected) else float("inf")
            after = [event for event in events if injected.time - 0.002 <= event["time"] < until]
            failed = next((event for event in after if event["event"] == "failed"), None)
            went_on = next((event for event in after if event["event"] in ("resumed", "started")), None)
            if went_on is None and code == 0:  # the run was through before it could take notice
                missed.append(injected.fault)
                continue
            phase = injected.phase or ("saved and left" if injected.fault.kind == STOP else _phase(failed, injected))
            found.append(replace(injected, phase=phase, resumed_from=went_on["step"] if went_on else None))
        return Injection(code, found, [*missed, *self._left], self._problem)


def _phase(failed: dict[str, Any] | None, injected: Injected) -> str:
    """Where the worker that was killed was at the time, as its heart says."""
    failures = failed["failures"] if failed is not None else []
    victims = [failure for failure in failures if failure["rank"] in injected.fault.ranks]
    return str((victims or failures)[0]["phase"]) if failures else ""
