"""When a run is saved, what is saved with it, and how it is put back."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from keepstep.checkpoint.saver import Saver
from keepstep.checkpoint.store import Manifest, Store
from keepstep.context import Context
from keepstep.errors import CheckpointError, ConfigError
from keepstep.observe.journal import Journal
from keepstep.seeding import capture_rng
from keepstep.state import Loaded, TrainingState, load, newest_good

if TYPE_CHECKING:
    from keepstep.checkpoint.mirror import Mirror


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


@contextmanager
def _without_collecting() -> Iterator[None]:
    """Within, Python does not look for garbage. The many small objects of a save make it look through everything,
    which takes longer than copying gigabytes; after it, a GPU has work to go on with meanwhile."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Checkpointer:
    """Saves and restores a run. Decisions are the same on every worker: what they depend on was agreed on before."""

    def __init__(self, context: Context, training: TrainingState, journal: Journal) -> None:
        self._context, self._training, self._journal = context, training, journal
        config = context.config.checkpoint
        self._store = Store(context.folder.checkpoints, config.keep, context.folder.mirror)
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
        # On the CPU memory is there at once, and needs no looking at the state.
        self._saver.warm_up(self._training.capture() if self._context.device.type == "cuda" else None)

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
                try:
                    self._store.remember_best(place.step, *best)
                except OSError as error:
                    raise self._saver.failure(place.step, error) from error
            return
        context = self._context
        manifest = Manifest(place.step, place.epoch, context.world_size, context.strategy.name, metrics=metrics)
        try:
            position = self._journal.position()
        except OSError as error:
            raise self._saver.failure(place.step, error) from error
        run = {**asdict(place), "metrics": metrics, "metrics_bytes": position}
        with _without_collecting():
            state = {**self._training.capture(), "run": run}
            self._saver.save(manifest, state, {"rng": capture_rng(), "epoch_rng": epoch_rng}, wait, best)

    def restore(self) -> Loaded | None:
        """Puts the newest good checkpoint back into the training state; None where there is none."""
        context = self._context
        fetches = context.local_rank == 0
        step, passed_over = newest_good(self._store, context.collective, context.rank, context.world_size, fetches)
        for problem in passed_over:
            self._journal.passed_over(problem)
        if context.rank == 0 or (self._store.mirror is not None and fetches):
            self._store.set_aside_after(-1 if step is None else step)
            self._store.sweep()
        if self._store.mirror is not None and fetches:
            self._store.prune()  # what earlier attempts fetched
        if context.rank == 0 and self._store.mirror is not None:
            self._tidy_mirror(self._store.mirror, step)
        self._saver.forget_after(-1 if step is None else step)
        if step is None:
            self._journal.fresh(lost_all=bool(passed_over))
            return None
        loaded = load(self._store, step, self._training, context.rank)
        _check_run(loaded)
        if context.rank == 0:
            self._journal.cut(loaded.state["run"]["metrics_bytes"])
        best = context.collective.from_rank0(self._store.best())
        if best and self._best_metric and best["metric"] == self._best_metric[0]:
            self._best_value = float(best["value"])
        self._journal.resumed(step, loaded, context)
        return loaded

    def _tidy_mirror(self, mirror: Mirror, step: int | None) -> None:
        """The object store after a crash: bad checkpoints aside, leftovers gone, the one resumed from there, too."""
        mirror.set_aside_after(-1 if step is None else step)
        mirror.sweep()
        if step is not None:
            best = self._store.best()
            mirror.publish(self._store.path(step), self._store.keep, best["step"] if best else None)

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


_RUN_FIELDS: dict[str, Any] = {
    "step": int,
    "epoch": int,
    "epoch_under_way": bool,
    "active_loader": (str, type(None)),
    "metrics": dict,
    "metrics_bytes": int,
}


def _check_run(loaded: Loaded) -> None:
    """Raises unless the run's own part of a checkpoint, which may be anybody's, is what the loop goes on by."""
    run, own = loaded.state.get("run"), loaded.rank_state
    is_ours = (
        isinstance(run, dict)
        and all(isinstance(run.get(name, ...), kind) for name, kind in _RUN_FIELDS.items())
        and run["step"] == loaded.step
        and min(run["epoch"], run["metrics_bytes"]) >= 0
    )
    if not is_ours:
        raise CheckpointError(f"the checkpoint of step {loaded.step} does not say how far the run was; {_NOT_OURS}")
    if own is not None and not (isinstance(own, dict) and {"rng", "epoch_rng"} <= own.keys()):
        raise CheckpointError(f"the checkpoint of step {loaded.step} lacks this worker's generators; {_NOT_OURS}")


_NOT_OURS = "it was not written by keepstep"
