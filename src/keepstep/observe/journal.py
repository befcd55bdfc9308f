"""Rank 0's pen: writes the run folder's metrics, events and result, and feeds the progress display."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from keepstep.checkpoint.store import Manifest, Store
from keepstep.context import Context
from keepstep.errors import RunFolderError
from keepstep.observe.heart import Heart
from keepstep.observe.ledger import Ledger
from keepstep.observe.metrics import MetricsFile
from keepstep.observe.recovery import Recovery
from keepstep.observe.sinks import check_installed
from keepstep.observe.sinks.of_run import RunSinks
from keepstep.state import Loaded

if TYPE_CHECKING:
    from keepstep.observe.console import Display


def nothing_left(metrics_kept: str | None) -> str:
    """What the user must not miss: a run that seemed to resume begins again."""
    kept = "the bad ones are kept as damaged-…" + (f", the metrics so far as {metrics_kept}" if metrics_kept else "")
    return f"keepstep: no good checkpoint is left: starting from step 0; {kept}"


class Journal:
    """Does nothing on other ranks. A supervisor, where there is one, holds the folder and writes the result."""

    def __init__(self, context: Context) -> None:
        self._folder = context.folder
        self._main = context.rank == 0
        self._alone = context.job is None
        self._display: Display | None = None
        self._file: MetricsFile | None = None
        self._sinks: RunSinks | None = None
        self._announced = False
        if self._alone:
            self._leave_if_finished(context)
        if not self._main:
            return
        if self._alone:
            check_installed(context.config.observe.destinations())
            self._folder.create()
            self._folder.hold()
            self._folder.fetch()  # again: while it was waited for, the run may have gone on elsewhere
        self._file = MetricsFile(self._folder.metrics)
        if context.has_terminal:
            from keepstep.observe.console import Display  # rich: not for workers that nobody sees

            self._display = Display()
            self._sinks = RunSinks(
                self._folder, self._say, trains_here=True
            )  # else a supervisor has them, in its own process
        settings = context.config.flat()
        settings.update(name=self._folder.name, strategy=context.strategy.name, device=str(context.device.type))
        settings.update(workers=context.world_size)
        self._folder.write_config({"settings": settings, "script": sys.argv[0], "arguments": sys.argv[1:]})

    def _leave_if_finished(self, context: Context) -> None:
        """A run that has finished does nothing, on any worker."""
        if self._main:
            self._folder.fetch()
        finished = context.collective.from_rank0(self._folder.read_result() if self._folder.finished else None)
        if finished is None:
            return
        if self._main:
            name, step = self._folder.name, finished["step"]
            print(f"keepstep: run '{name}' finished at step {step}; another name starts a new one")
        context.leave()
        raise SystemExit(0)

    def training(self, epochs: int | None, batches: int | None) -> None:
        """How long the training will be, as far as it is known."""
        if not self._main or self._announced:
            return
        self._announced = True
        total = epochs * batches if epochs and batches else None
        self._folder.event("training", epochs=epochs, steps_per_epoch=batches, total_steps=total)
        if self._display is not None:
            self._display.expect(total)

    def write(self, lines: list[dict[str, Any]], step: int, epoch: int) -> None:
        if self._file is not None:
            try:
                self._file.write(lines)
            except OSError as error:
                raise self._failure(error) from error
        if self._display is not None:
            merged = {name: value for line in lines for name, value in line.items()}
            self._display.update(step, epoch, merged)

    def _failure(self, error: OSError) -> RunFolderError:
        newest = Store(self._folder.checkpoints, keep=1).steps()[-1:]
        kept = f"the newest good checkpoint is of step {newest[0]}" if newest else "there is no checkpoint yet"
        what = f"{self._folder.metrics} could not be written ({error.strerror or error})"
        return RunFolderError(f"{what}; {kept}; see to that, then start the same command again")

    def position(self) -> int:
        """How long metrics.jsonl is, on the disk."""
        return self._file.position() if self._file is not None else 0

    def cut(self, position: int) -> None:
        if self._file is not None:
            self._file.cut(position)

    def saved(self, manifest: Manifest, seconds: float) -> None:
        self._folder.event("checkpoint", step=manifest.step, seconds=round(seconds, 3))

    def passed_over(self, problem: str) -> None:
        if self._main:
            self._folder.event("checkpoint_passed_over", problem=problem)
            self._say(f"keepstep: passed over a bad checkpoint: {problem}")

    def fresh(self, lost_all: bool) -> None:
        """The run starts from step 0. `lost_all`: not for the first time; there were checkpoints, and all are bad."""
        if self._main:
            if lost_all:
                kept = self._folder.keep_metrics()
                self._folder.event("no_checkpoint_left", metrics_kept=kept)
                self._say(nothing_left(kept))
            self.cut(0)
            self._folder.event("started", step=0)
            self._say(f"keepstep: run '{self._folder.name}' in {self._folder.where}")
            self._open_sinks()

    def resumed(self, step: int, loaded: Loaded, context: Context) -> None:
        if self._main:
            self._folder.event("resumed", step=step, saved_by_workers=loaded.world_size, workers=context.world_size)
            self._say(f"keepstep: run '{self._folder.name}' goes on from step {step}, in {self._folder.where}")
            self._open_sinks()

    def recovered(self, step: int, recovery: Recovery) -> None:
        seconds = recovery.seconds()
        if self._main and seconds is not None:
            self._folder.event("recovered", step=step, seconds=seconds, total=round(sum(seconds.values()), 3))

    def stopped(self, step: int) -> None:
        if self._main:
            self._folder.event("stopped", step=step)
            self.close_sinks("stopped")
            self._say(f"keepstep: stopped on request, saved at step {step}; the same command goes on from there")

    def finished(self, step: int, epoch: int, metrics: dict[str, float], heart: Heart) -> None:
        if not self._main:
            return
        self._folder.event("finished", step=step, epoch=epoch, metrics=metrics)
        self.close_sinks("finished")
        if self._alone:
            phases = heart.totals()
            ledger = Ledger()
            ledger.add_attempt(phases, sum(phases.values()), after_failure=False)
            self._folder.write_result(
                {"status": "finished", "step": step, "epoch": epoch, "metrics": metrics, "seconds": ledger.seconds}
            )
            if self._display is not None:  # a supervisor would say it
                self._display.finish(step, metrics, ledger)

    def _open_sinks(self) -> None:
        if self._sinks is not None:
            self._sinks.open()

    def close_sinks(self, status: str) -> None:
        """Tells them how the run ended; the first word counts."""
        if self._sinks is not None:
            self._sinks.close(status)

    def close(self) -> None:
        self.close_sinks("failed")
        if self._display is not None:
            self._display.close()
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._alone and self._main:
            try:
                self._folder.push()
            finally:
                self._folder.release()

    def _say(self, text: str) -> None:
        if self._display is not None:
            self._display.say(text)
