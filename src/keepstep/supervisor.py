"""Attempts: launch, failure, decide, relaunch; and what the user sees of it."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import tempfile
import time
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from keepstep.config import Config
from keepstep.device import choose_device
from keepstep.engines import Launch, Outcome, make_engine
from keepstep.errors import EXIT_FAILED, EXIT_STOPPED, EXIT_USAGE, ConfigError, RunFolderError, StorageError
from keepstep.failure import (
    HANG,
    NOT_FINITE,
    WorkerFailure,
    decide,
    describe,
    first_cause_first,
    made_different_calls,
)
from keepstep.folder import RunFolder
from keepstep.job import JOB, Job, Target, script_name, stamped
from keepstep.observe.accounts import Accounts
from keepstep.observe.console import Display
from keepstep.observe.hang import Request, different_calls
from keepstep.observe.health import Verdict
from keepstep.observe.heart import Pulse
from keepstep.observe.journal import nothing_left
from keepstep.observe.monitor import Monitor
from keepstep.observe.recovery import Death, marks
from keepstep.observe.sinks import check_installed
from keepstep.observe.sinks.of_run import RunSinks
from keepstep.observe.stacks import stack_of, where
from keepstep.observe.tail import Tail
from keepstep.signals import StopSignals
from keepstep.strategies.checks import check_flags
from keepstep.worker import FAILURE_MARK


@dataclass(frozen=True)
class Result:
    """How a run ended."""

    outcome: Outcome
    name: str
    path: Path
    step: int
    metrics: dict[str, Any]
    failures: list[WorkerFailure]

    @property
    def exit_code(self) -> int:
        if self.failures and self.failures[0].user_error:
            return EXIT_USAGE
        return {Outcome.FINISHED: 0, Outcome.STOPPED: EXIT_STOPPED, Outcome.FAILED: EXIT_FAILED}[self.outcome]


def supervise(
    settings: dict[str, Any], target: Target, began: float | None = None, fingerprints: bool = False
) -> Result:
    """Runs a target to its end under `settings`, the ones that were given by hand.

    `began`: when the user began to wait, if that was before now. `fingerprints`: workers note one of every step, for
    `keepstep verify`.
    """
    config = Config.from_settings(settings)
    _check(config)
    target.check()
    name = config.folder.name or _default_name(config, target)
    folder = RunFolder(config.folder.storage, name)
    folder.create()
    if config.launch.node_rank == 0:
        folder.hold()
    else:
        folder.forget_hold()
    try:
        try:
            folder.fetch()
        except StorageError:
            folder.withdraw()
            raise
        if folder.finished:
            folder.push_end()
            return _already_finished(folder, target)
        return Supervisor(settings, config, target, folder, began or time.time(), fingerprints).run()
    finally:
        folder.release()


def _check(config: Config) -> None:
    """Raises what workers would raise, as far as this machine knows, before anything is started."""
    device = None
    if config.launch.resolved_engine != "ray":  # whose workers may have what is not here
        if config.strategy.device == "cuda":
            choose_device(config.strategy, 0, config.launch.workers_per_node)
        # With a GPU here, the script may still choose; without one there is no choice.
        is_cpu = config.strategy.device == "cpu" or not torch.cuda.is_available()
        device = "cpu" if is_cpu else None
    check_flags(config.strategy, config.launch.max_workers, device)
    check_installed(config.observe.destinations())


def _default_name(config: Config, target: Target) -> str:
    if config.launch.nodes > 1:
        raise ConfigError("--nodes needs --name: every node must call the run by the same one")
    stem = target.what if target.is_script else target.what.partition(":")[2]
    name = stamped(script_name(stem), time.time())
    taken = RunFolder(config.folder.storage, name).path.exists()  # by a run of this same second
    return f"{name}-{os.getpid()}" if taken else name


def _already_finished(folder: RunFolder, target: Target) -> Result:
    result = folder.read_result()
    launched = [event.get("arguments") for event in folder.read_events() if event["event"] == "launched"]
    had, given = (launched[-1] if launched else None), list(target.arguments)
    if isinstance(had, list) and had != given:
        raise ConfigError(
            f"run '{folder.name}' finished at step {result['step']}, given [{shlex.join(map(str, had))}]; it is given "
            f"[{shlex.join(given)}] now, and does nothing with it: another --name starts anew"
        )
    print(
        f"keepstep: run '{folder.name}' finished at step {result['step']}: nothing to do (another --name starts anew)",
        file=sys.stderr,
    )
    return Result(Outcome.FINISHED, folder.name, folder.path, result["step"], result["metrics"], [])


class Supervisor:
    """One run on this machine, through all of its attempts."""

    def __init__(
        self,
        settings: dict[str, Any],
        config: Config,
        target: Target,
        folder: RunFolder,
        began: float,
        fingerprints: bool,
    ) -> None:
        self._config, self._target, self._folder = config, target, folder
        self._in_process = config.launch.resolved_engine == "inprocess"
        self._display = Display()
        self._history: list[list[WorkerFailure]] = []
        self._accounts = Accounts(folder, began, writes=config.launch.node_rank == 0)
        self._events_before = len(folder.read_events())
        self._hearts = Path(tempfile.mkdtemp(prefix="keepstep-hearts-"))
        # Workers may start in another folder, and the script may have a --storage of its own: this is the run's.
        placed = {**settings, "storage": folder.storage}
        self._job = Job(placed, folder.name, str(self._hearts), self._in_process, fingerprints=fingerprints)
        self._stopping = False
        self._tail = Tail(folder, mute_after=FAILURE_MARK)
        self._monitor = self._new_monitor()
        # What Ray's workers write without a shared folder is copied over events.jsonl: a line of ours has to wait.
        self._is_copied = folder.mirror is not None and config.launch.resolved_engine == "ray"
        self._verdicts: list[dict[str, Any]] = []
        """Those that wait so."""
        self._sinks = RunSinks(folder, self._display.say, writes_events=not self._is_copied)

    @property
    def _leads(self) -> bool:
        """Whether this machine writes what is written once a run."""
        is_first = self._config.launch.node_rank == 0
        if self._folder.mirror is None:
            return is_first
        # No folder is shared: only the machine of rank 0, which may be any, has the metrics and events.
        pulses = self._pulses()
        return 0 in pulses if pulses else is_first

    def run(self) -> Result:
        signals = None if self._in_process else StopSignals(self._ask_to_stop)
        try:
            outcome = self._launch()
            self._watch()
            self._display.close()
            return self._conclude(outcome)
        except Exception:
            self._sinks.close("failed")
            raise
        finally:
            if signals is not None:
                signals.restore()
            os.environ.pop(JOB, None)
            self._display.close()
            shutil.rmtree(self._hearts, ignore_errors=True)

    def _launch(self) -> Outcome:
        engine = make_engine(self._config.launch.resolved_engine)
        launch = Launch(
            config=self._config.launch,
            target=self._target,
            device=self._config.strategy.device,
            folder=self._folder,
            before_attempt=self._before_attempt,
            on_failure=self._on_failure,
            watch=self._watch,
            say=lambda text: self._display.say(text, style="yellow"),
            asked_to_stop=lambda: self._stopping,
            hearts=self._hearts,
        )
        outcome = engine.run(launch)
        # Of the last attempt: workers also stop to go on elsewhere.
        kinds = [event["event"] for event in self._new_events()]
        stopped = "stopped" in kinds[len(kinds) - kinds[::-1].index("launched") :] if "launched" in kinds else False
        return Outcome.STOPPED if stopped and outcome is Outcome.FINISHED else outcome

    def _before_attempt(self) -> None:
        for pulse in self._pulses().values():
            pulse.reset()
        self._monitor = self._new_monitor()
        self._tail.unmute()
        self._job = replace(self._job, launched=time.time())
        os.environ[JOB] = self._job.to_json()
        self._job = replace(self._job, death=None)  # the next attempt may have another reason
        if self._leads:
            # As they were given: a script may change its own sys.argv, which stands in config.json.
            arguments = list(self._target.arguments)
            attempt = len(self._history) + 1
            self._folder.event("launched", workers=self._config.launch.workers, attempt=attempt, arguments=arguments)

    def _on_failure(self, failures: list[WorkerFailure], death: Death) -> bool:
        pulses = self._pulses()
        located = [self._located(failure, pulses.get(failure.rank)) for failure in failures]
        hang = self._monitor.hang
        ordered = first_cause_first(located) if hang is None else [_hung(hang, located)]
        if made_different_calls(ordered):
            self._give_verdict(different_calls(ordered), {})
        self._write_verdicts()
        self._accounts.close_attempt(self._phases(until=death.died - (hang.figure if hang is not None else 0.0)))
        self._history.append(ordered)
        decision = decide(self._history, self._config.launch.max_failures)
        retry = decision.retry and not self._stopping
        reached = max([self._job.replay_until, *(pulse.step for pulse in pulses.values())])
        inspected = ordered[0].step + 1 if ordered[0].cause == NOT_FINITE else 0
        self._job = replace(self._job, replay_until=reached, inspected_step=inspected, death=marks(death))
        if self._leads:
            failed = [{"rank": f.rank, "cause": f.cause, "message": f.message, "step": f.step, "phase": f.phase,
                       "traceback": f.traceback, "log_tail": f.log_tail} for f in ordered]  # fmt: skip
            with suppress(RunFolderError):  # a disk that is full is the failure itself, and is said below
                self._folder.event("failed", failures=failed, retry=retry, reason=decision.reason)
        self._watch()
        if hang is None:  # which has been said
            self._display.say(f"keepstep: {describe(ordered)}", style="red")
        if ordered[0].user_error:
            return False  # the message says what to do
        self._display.say(f"keepstep: {decision.reason}; {self._what_now(retry)}", style="yellow")
        return retry

    def _what_now(self, retry: bool) -> str:
        if not retry:
            return "giving up"
        has_checkpoint = any(event["event"] == "checkpoint" for event in self._folder.read_events())
        return "going on from the newest checkpoint" if has_checkpoint else "starting again"

    def _located(self, failure: WorkerFailure, pulse: Pulse | None) -> WorkerFailure:
        """Adds the step and phase that the worker's heartbeat was in when it stopped."""
        if pulse is None:
            return failure if failure.phase else replace(failure, phase="start")
        step = failure.step if failure.is_exception else pulse.step
        stack = stack_of(pulse) if not failure.traceback else []
        message = f"at {where(stack)}" if stack and not failure.message else failure.message
        return replace(failure, step=step, phase=pulse.phase, message=message)

    def _pulses(self) -> dict[int, Pulse]:
        return {int(path.name.removeprefix("rank_")): Pulse(path) for path in self._hearts.glob("rank_*")}

    def _phases(self, until: float | None = None) -> dict[str, float]:
        """Where the attempt's time has gone, as its lowest rank on this machine measured it. What comes after a
        death, `until`, is no worker's time: it is recovery."""
        pulses = self._pulses()
        return pulses[min(pulses)].totals(until) if pulses else {}

    def _new_monitor(self) -> Monitor:
        return Monitor(self._hearts, self._config.observe.hang_timeout, self._give_verdict)

    def _give_verdict(self, verdict: Verdict, stacks: dict[int, list[str]]) -> None:
        self._display.say(f"keepstep: {verdict}", style="yellow")
        fields = {"what": verdict.kind, "rank": verdict.rank, "text": verdict.text, "advice": verdict.advice}
        self._verdicts.append({**fields, "figure": verdict.figure, **({"stacks": stacks} if stacks else {})})
        if not self._is_copied:
            self._write_verdicts()

    def _write_verdicts(self) -> None:
        verdicts, self._verdicts = self._verdicts, []
        with suppress(RunFolderError):  # a disk that is full is the failure itself, and is said by who must write
            for verdict in verdicts:
                self._folder.event("verdict", **verdict)

    def _ask_to_stop(self) -> None:
        self._stopping = True
        self._pass_on_stop()
        self._display.say("keepstep: asked to stop: saving at the next step (again: stop at once)", style="yellow")

    def _pass_on_stop(self) -> None:
        for pulse in self._pulses().values():
            pulse.ask_to_stop()

    def _watch(self) -> Request | None:
        """Passes on rank 0's output, shows how far it is, and looks after the workers' health."""
        if self._accounts.are_due:
            step = max((pulse.step for pulse in self._pulses().values()), default=0)
            self._accounts.write(self._phases(), step)
        if self._in_process:  # whose worker shows itself
            return self._monitor.look(self._tail.read().metrics)
        if self._stopping:  # workers that were not up yet when it was asked
            self._pass_on_stop()
        news = self._tail.read()
        if news.output:
            self._display.echo(news.output)
        for event in news.events:
            self._show_event(event)
            if event["event"] in ("started", "resumed") and self._leads:
                self._sinks.open()
        if news.metrics:
            newest = news.metrics[-1]
            merged = {name: value for line in news.metrics for name, value in line.items()}
            self._display.update(newest["step"], newest.get("epoch", 0), merged)
        return self._monitor.look(news.metrics)

    def _show_event(self, event: dict[str, Any]) -> None:
        kind, name = event["event"], self._folder.name
        if kind == "training":
            self._display.expect(event["total_steps"])
        elif kind == "started":
            self._display.say(f"keepstep: run '{name}' in {self._folder.where}")
        elif kind == "resumed":
            before, now = event["saved_by_workers"], event["workers"]
            change = f", with {now} workers instead of {before}" if now != before else ""
            where = self._folder.where
            self._display.say(f"keepstep: run '{name}' goes on from step {event['step']}{change}, in {where}")
        elif kind == "checkpoint_passed_over":
            self._display.say(f"keepstep: passed over a bad checkpoint: {event['problem']}", style="yellow")
        elif kind == "no_checkpoint_left":
            self._display.say(nothing_left(event["metrics_kept"]), style="red")
        elif kind == "stopped" and self._config.launch.resolved_engine == "ray" and not self._stopping:
            self._display.say(f"keepstep: saved at step {event['step']}, to go on with other workers")
        elif kind == "stopped":
            self._display.say(
                f"keepstep: stopped on request, saved at step {event['step']}; the same command goes on from there"
            )

    def _new_events(self) -> list[dict[str, Any]]:
        return self._folder.read_events()[self._events_before :]

    def _conclude(self, outcome: Outcome) -> Result:
        if outcome is not Outcome.FAILED:
            self._accounts.close_attempt(self._phases())
        ledger = self._accounts.ledger
        self._write_verdicts()
        self._sinks.close(outcome.value)  # before the result: killed in between, the run ends once more, and so do they
        last: dict[str, Any] = {}
        for event in self._new_events():
            if event["event"] in ("finished", "stopped", "checkpoint", "resumed"):
                last.update(event)
        unknown = 0 if self._leads else max((pulse.step for pulse in self._pulses().values()), default=0)
        step, metrics = int(last.get("step", unknown)), last.get("metrics", {})
        if self._leads:
            result = {
                "status": outcome.value,
                "step": step,
                "epoch": last.get("epoch"),
                "metrics": metrics,
                "attempts": len(self._history) + (outcome is not Outcome.FAILED),
                "seconds": ledger.seconds,
            }
            # What made the run fail has been said, and may be why this cannot be written.
            with suppress(RunFolderError) if outcome is Outcome.FAILED else nullcontext():
                self._folder.event("ended", outcome=outcome.value, step=step, seconds=ledger.seconds)
                self._folder.write_result(result)
                self._accounts.close()
            if outcome is Outcome.FAILED:
                self._folder.push_after_failure()
            else:
                self._folder.push()
        if outcome is Outcome.FINISHED:
            self._display.finish(step, metrics, ledger)
        failures = self._history[-1] if outcome is Outcome.FAILED else []
        return Result(outcome, self._folder.name, self._folder.path, step, metrics, failures)


def _hung(hang: Verdict, killed: list[WorkerFailure]) -> WorkerFailure:
    """The workers were killed because one hung: that is the cause, not the signal."""
    first = next((failure for failure in killed if failure.rank == hang.rank), killed[0])
    return replace(first, cause=HANG, message=f"no sign of life for {hang.figure:.0f} s", traceback="", log_tail="")
