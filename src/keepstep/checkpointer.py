"""When a run is saved, what is saved with it, and how it is put back."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass
from typing import Any

from keepstep.checkpoint.saver import Saver
from keepstep.checkpoint.store import Manifest, Store
from keepstep.context import Context
from keepstep.errors import ConfigError
from keepstep.observe.journal import Journal
from keepstep.seeding import capture_rng
from keepstep.state import Loaded, TrainingState, load, newest_good


@dataclass
class Place:
    """How far a run is."""

    step: int = 0
    """Completed optimizer steps."""
    epoch: int = 0
    epoch_under_way: bool = False
    """Whether the epoch's body has begun: then a resume goes on in the middle of it."""
    active_loader: str | None = None
    """The loader that the newest step came from."""


class Checkpointer:
    """Saves and restores a run. Decisions are the same on every worker: what they depend on was agreed on before."""

    def __init__(self, context: Context, training: TrainingState, journal: Journal) -> None:
        self._context, self._training, self._journal = context, training, journal
        config = context.config.checkpoint
        self._store = Store(context.folder.checkpoints, config.keep)
        in_background = config.checkpoint_mode == "async"
        self._saver = Saver(
            self._store, context.rank, context.save_group, context.nonce, in_background, journal.saved
        )  # fmt: skip
        self._every_steps, self._every_s = config.interval()
        self._last_save = time.monotonic()
        self._best_metric = config.best()
        self._best_value: float | None = None
        self._new_best: tuple[str, float] | None = None
        """A best value whose checkpoint is not saved yet: noted only once it is."""

    def due_at(self, step: int) -> bool:
        return self._every_steps is not None and step % self._every_steps == 0

    @property
    def due_by_time(self) -> bool:
        """By this worker's clock: rank 0's counts."""
        return self._every_s is not None and time.monotonic() - self._last_save >= self._every_s

    def warm_up(self) -> None:
        self._saver.warm_up()

    def raise_error(self) -> None:
        """Raises what went wrong in a save that was written beside training."""
        self._saver.raise_error()

    def wait(self) -> None:
        self._saver.wait()

    def save(
        self, place: Place, metrics: dict[str, float], epoch_rng: dict[str, Any] | None, wait: bool = False
    ) -> None:
        """Saves the run as it is; nothing to do where this step is saved already."""
        self._last_save = time.monotonic()
        best, self._new_best = self._new_best, None
        if self._saver.has(place.step):
            if wait or best:
                self._saver.wait()
            if best and self._context.rank == 0:
                self._store.remember_best(place.step, *best)
            return
        context = self._context
        manifest = Manifest(place.step, place.epoch, context.world_size, context.strategy.name, metrics=metrics)
        run = {**asdict(place), "metrics": metrics, "metrics_bytes": self._journal.position()}
        state = {**self._training.capture(), "run": run}
        self._saver.save(manifest, state, {"rng": capture_rng(), "epoch_rng": epoch_rng}, wait, best)

    def restore(self) -> Loaded | None:
        """Puts the newest good checkpoint back into the training state; None where there is none."""
        context = self._context
        step, passed_over = newest_good(self._store, context.collective, context.rank, context.world_size)
        for problem in passed_over:
            self._journal.passed_over(problem)
        if context.rank == 0:
            self._store.sweep()
        if context.rank == 0:
            self._store.set_aside_after(-1 if step is None else step)
        self._saver.forget_after(-1 if step is None else step)
        if step is None:
            self._journal.fresh()
            return None
        loaded = load(self._store, step, self._training, context.rank)
        if context.rank == 0:
            self._journal.cut(loaded.state["run"]["metrics_bytes"])
        best = context.collective.from_rank0(self._store.best())
        if best and self._best_metric and best["metric"] == self._best_metric[0]:
            self._best_value = float(best["value"])
        self._journal.resumed(step, loaded, context)
        return loaded

    def improves(self, metrics: dict[str, float]) -> bool:
        """Whether an epoch gave the best value yet of `--keep-best`'s metric; the next save is noted as the best."""
        if self._best_metric is None:
            return False
        metric, higher_is_better = self._best_metric
        if metric not in metrics:
            return False
        value, best = float(metrics[metric]), self._best_value
        improved = not math.isnan(value) and (best is None or (value > best if higher_is_better else value < best))
        if improved:
            self._best_value, self._new_best = value, (metric, value)
        return improved

    def check_best(self, metrics: dict[str, float]) -> None:
        """Raises, once everything is trained and saved, if `--keep-best` named a metric that was never logged."""
        if self._best_metric is not None and self._best_metric[0] not in metrics:
            logged = ", ".join(sorted(metrics)) or "nothing"
            raise ConfigError(
                f"--keep-best names '{self._best_metric[0]}', which no epoch has logged; logged: {logged}"
            )
