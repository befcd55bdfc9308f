"""One script's verification: the undisturbed run, the disturbed ones, what they show, and the certificate."""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from keepstep.config import Config
from keepstep.errors import EXIT_FAILED, EXIT_USAGE
from keepstep.folder import RunFolder
from keepstep.job import Target
from keepstep.verify.cause import Cause, of_lost_state, of_nondeterminism
from keepstep.verify.certificate import Certificate
from keepstep.verify.compare import METRICS, compare, unsteady_metrics
from keepstep.verify.inject import Injector
from keepstep.verify.launch import Command, Launched
from keepstep.verify.plan import Fault, checkpoint_interval, draw
from keepstep.verify.prints import read_files, read_suspects
from keepstep.verify.report import print_certificate, say, tail_of
from keepstep.verify.resized import compare_resized
from keepstep.verify.source import Source

_TRIES = 3
"""Runs to place the faults in: a short one may be over before the last of them."""
_STALL_S = 120.0
_HASH_SEED = "PYTHONHASHSEED"


@dataclass(frozen=True)
class Options:
    """The flags that are verify's own."""

    kills: int
    faults_seed: int | None
    output: str | None


class Verification:
    """Every run of it is an ordinary one, NAME-reference, NAME-faults, …, in the storage folder."""

    def __init__(self, settings: dict[str, Any], target: Target, options: Options, seed: int, name: str) -> None:
        self._settings, self._target, self._options, self._name = settings, target, options, name
        self._config = Config.from_settings(settings)
        self._folder = RunFolder(self._config.folder.storage, name).path
        self._certificate = Certificate(target, seed)
        self._ignored: frozenset[str] = frozenset()
        """Metrics that differ in undisturbed runs, too."""
        self._again: RunFolder | None = None
        """The second undisturbed run, if one was needed."""
        self._began = time.monotonic()

    def run(self) -> int:
        """Returns the exit code."""
        self._folder.mkdir(parents=True, exist_ok=True)
        certificate = self._certificate
        say(f"seed of the faults: {certificate.seed} (--faults-seed {certificate.seed} draws the same again)")
        say(f"undisturbed, as {self._name}-reference")
        code = self._undisturbed("reference")
        if code:
            return code
        reference = self._command("reference").folder
        self._describe(reference)
        workers = self._config.launch.max_workers
        faults = draw(certificate.seed, self._options.kills, certificate.steps, certificate.every, workers)
        self._disturb(reference, faults)
        if self._differs:
            certificate.resize_skipped = "the run differs already with the same number of workers"
            certificate.cause = self._find_cause(reference)
        elif not certificate.problems:
            self._resize(reference)
        certificate.seconds = time.monotonic() - self._began
        files = certificate.write(Path(self._options.output) if self._options.output else self._folder)
        print_certificate(certificate, files)
        return 0 if certificate.is_certified else EXIT_FAILED

    @property
    def _differs(self) -> bool:
        return any(comparison.differences for comparison in self._certificate.comparisons.values())

    # -- runs ---------------------------------------------------------------------------------------------------------

    def _command(self, part: str, **changed: Any) -> Command:
        # Twice as many as are planned: a kill that comes just after a save is made again.
        budget = max(self._config.launch.max_failures, 4 * self._options.kills + 4)
        settings = {**self._settings, "name": f"{self._name}-{part}", "max_failures": budget}
        settings["storage"] = self._config.folder.storage
        if self._certificate.every:
            settings["checkpoint_every"] = str(self._certificate.every)
        return Command({**settings, **changed}, self._target, self._folder / f"{part}.txt")

    def _undisturbed(self, part: str, environment: dict[str, str] | None = None) -> int:
        """Returns an exit code."""
        command = replace(self._command(part), environment=environment or {})
        with Launched(command) as launched:
            code = launched.wait()
        if code:
            say(f"the undisturbed run failed; nothing can be verified. The end of what it printed:\n{tail_of(command)}")
        return code if code in (0, EXIT_USAGE) else EXIT_FAILED

    def _describe(self, reference: RunFolder) -> None:
        """What the undisturbed run has shown of the script."""
        certificate = self._certificate
        certificate.settings = dict(reference.read_config()["settings"])
        certificate.settings["engine"] = self._config.launch.resolved_engine
        certificate.steps = int(reference.read_result()["step"])
        given = self._config.checkpoint.interval()[0]
        certificate.every = checkpoint_interval(given, certificate.steps)
        instead = f", not every {self._settings['checkpoint_every']}" if "checkpoint_every" in self._settings else ""
        instead = instead if given != certificate.every else ""
        say(f"{certificate.steps} steps; disturbed runs save every {certificate.every}{instead}")

    def _disturb(self, reference: RunFolder, faults: list[Fault]) -> None:
        step_s = _seconds_a_step(reference)
        stall_s = _STALL_S + 2 * (time.monotonic() - self._began)
        for number in range(_TRIES):
            command = self._command("faults" if number == 0 else f"faults-{number + 1}")
            say(f"with {len(faults)} fault{'s' if len(faults) > 1 else ''}, as {command.folder.name}")
            injector = Injector(command, faults, step_s, stall_s, on_stop=partial(self._keep_copy, command.folder))
            done = injector.run()
            self._certificate.injected += done.injected
            if done.code:
                text = done.problem or f"run {command.folder.name} ended with exit code {done.code}"
                self._certificate.problems.append(text)
                say(f"{text}; the end of what it printed:\n{tail_of(command)}")
                return
            self._compare(reference, command.folder)
            faults = done.left
            if not faults:
                return
        kinds = ", ".join(fault.kind for fault in faults)
        self._certificate.problems.append(
            f"the run is over too soon for {len(faults)} of the faults ({kinds}); let it make more steps"
        )

    def _keep_copy(self, folder: RunFolder) -> None:
        """The run has saved and left on request: a copy of it is to go on with another number of workers."""
        copy = self._resized_command().folder.path
        if not copy.exists():
            shutil.copytree(folder.path, copy, ignore=shutil.ignore_patterns(".*"))

    def _compare(self, reference: RunFolder, folder: RunFolder) -> None:
        found = compare(reference, folder)
        if found.differences.keys() == {METRICS}:
            # A speed that is logged differs in every run, and says nothing.
            again = self._second_undisturbed()
            self._ignored = unsteady_metrics(reference, again) if again is not None else frozenset()
            found = compare(reference, folder, self._ignored)
            if self._ignored:
                names = ", ".join(sorted(self._ignored))
                self._certificate.notes.append(
                    f"metrics that differ in undisturbed runs, too, so not compared: {names}"
                )
        self._certificate.comparisons[folder.name.removeprefix(f"{self._name}-")] = found

    def _second_undisturbed(self) -> RunFolder | None:
        if self._again is None:
            say(f"it differs; undisturbed a second time, as {self._name}-again")
            if self._undisturbed("again") == 0:
                self._again = self._command("again").folder
        return self._again

    # -- another number of workers ------------------------------------------------------------------------------------

    def _resized_command(self) -> Command:
        before = self._config.launch.max_workers
        workers = 2 if before == 1 else before // 2 if before % 2 == 0 else 1
        changed: dict[str, Any] = {"workers": workers}
        if self._settings.get("strategy") == "single":
            changed["strategy"] = "ddp"
        if self._config.launch.engine != "ray":
            changed["engine"] = "torchrun"
        return self._command("resized", **changed)

    def _resize(self, reference: RunFolder) -> None:
        certificate, command = self._certificate, self._resized_command()
        stopped_at = next(
            (event["step"] for event in reversed(command.folder.read_events()) if event["event"] == "stopped"), 0
        )
        if not 0 < stopped_at < certificate.steps:
            certificate.resize_skipped = f"the run was stopped at step {stopped_at}, which leaves no steps to compare"
            return
        say(f"on with {command.settings['workers']} worker(s) from where it was stopped, as {command.folder.name}")
        with Launched(command) as launched:
            code = launched.wait()
        if code == EXIT_USAGE:  # as where the batch does not divide
            certificate.resize_skipped = _last_error(command)
        elif code:
            certificate.problems.append(f"run {command.folder.name} ended with exit code {code}")
            say(f"it failed; the end of what it printed:\n{tail_of(command)}")
        else:
            certificate.resized = compare_resized(reference, command.folder, self._ignored)

    # -- causes -------------------------------------------------------------------------------------------------------

    def _find_cause(self, reference: RunFolder) -> Cause | None:
        name, found = next((n, c) for n, c in self._certificate.comparisons.items() if c.differences)
        again = self._second_undisturbed()
        if again is None or found.first is None:
            return None
        calm = compare(reference, again, self._ignored)
        other, source = self._command(name).folder, Source(self._target.what, read_files(reference.path))
        is_steady = not calm.differences.keys() - {METRICS}
        if is_steady and (found.first.attempt > 0 or found.first.kind == METRICS):
            return of_lost_state(reference.path, other.path, found.first, source)
        suspects = list(dict.fromkeys([*read_suspects(reference.path), *read_suspects(other.path)]))
        shown = found if is_steady else calm
        device = str(self._certificate.settings["device"])
        return of_nondeterminism(shown, suspects, source, device, lambda: self._hash_seed_helps(source))

    def _hash_seed_helps(self, source: Source) -> bool:
        """Whether two runs with one PYTHONHASHSEED are equal; not tried where nothing in the script depends on it."""
        if _HASH_SEED in os.environ or not source.hash_orders():
            return False
        say(f"with {_HASH_SEED}=0 twice, as {self._name}-hash-1 and -2")
        parts = ("hash-1", "hash-2")
        if any(self._undisturbed(part, {_HASH_SEED: "0"}) for part in parts):
            return False
        one, other = (self._command(part).folder for part in parts)
        return not compare(one, other, self._ignored).differences


def _seconds_a_step(reference: RunFolder) -> float:
    events = reference.read_events()
    began = next(event["time"] for event in events if event["event"] == "training")
    ended = next(event for event in events if event["event"] == "finished")
    return float(ended["time"] - began) / max(1, int(ended["step"]))


def _last_error(command: Command) -> str:
    for event in reversed(command.folder.read_events()):
        if event["event"] == "failed":
            return str(event["failures"][0]["message"])
    return tail_of(command).splitlines()[-1]
