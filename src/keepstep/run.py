"""Run: the training loop's companion, and the one file a user may want to read. The loop, in pseudocode:

run = start()                       device, process group, seeds, run folder
prepare(model, optimizer, ...)      to the device, spread over the workers
for epoch in run.epochs(n):         first use: restore the newest good checkpoint
    for batch in run.steps(loader):
        ...the user's body...
        -- asked for the next batch, so the body is done: THE BOUNDARY --
        step += 1
        every worker gets rank 0's buffers
        now and then: metrics reduced and written, stop requests agreed on
        if due: save                (copy aside, write while training goes on)
        if asked to stop: save, leave
    ...validation, run.log(...)...
    -- asked for the next epoch: a boundary too --
after the last: save, write the result
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import nn

from keepstep.artifacts import whole, write_artifact
from keepstep.checkpointer import Checkpointer, Place
from keepstep.context import Context
from keepstep.data.loader import Batch, Loader
from keepstep.data.nested import in_parts, size_of
from keepstep.divergence import Inspector, check_numbers
from keepstep.errors import LoopError, Stopped
from keepstep.exchange import Exchange
from keepstep.fingerprints.switch import begin_fingerprints
from keepstep.observe.heart import CHECKPOINT, DATA, IDLE, REPLAY, STEP, VALIDATION, Heart
from keepstep.observe.journal import Journal
from keepstep.observe.metrics import Record
from keepstep.observe.recovery import Recovery
from keepstep.observe.stacks import StackWriter
from keepstep.preparation import prepare
from keepstep.seeding import capture_rng, mix, restore_rng, seed_everything
from keepstep.signals import StopRequest
from keepstep.state import Loaded, TrainingState
from keepstep.strategies.forward import hold_of


class Run:
    """One worker's view of a training run; made by `keepstep.start()`."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.rank, self.world_size, self.device = context.rank, context.world_size, context.device
        self.is_main = context.rank == 0
        self.name, self.path = context.folder.name, context.folder.path
        self.stopped = False
        """Whether the run was asked to stop, has saved, and is on its way out."""
        self.left_at: int | None = None
        """The step in whose body the loop was left, if it was."""
        self._place = Place()
        self._heart = Heart(context.heart_path, context.job.launched if context.job else None)
        self._stacks = StackWriter(context.heart_path, not context.has_terminal) if context.heart_path else None
        self._recovery = Recovery(context.job, context.began)
        self._journal = Journal(context)  # leaves, if the run has finished
        self._stop = StopRequest(self._heart, supervised=not context.has_terminal)
        self._state = TrainingState(scaler=context.strategy.gradient_scaler())
        self._exchange = Exchange(context, self._heart)
        self._metrics = self._exchange.metrics
        self._checkpointer = Checkpointer(context, self._state, self._journal)
        self._fingerprints = begin_fingerprints(context, self._state)  # None but under `keepstep verify`
        self._replay_until = context.job.replay_until if context.job else 0
        self._batch: Batch | None = None
        """The batch whose step is under way."""
        self._part: float | None = None
        """Share of the batch that the current micro-batch is."""
        self._stepping = False
        self._restored = False
        self._rng_to_restore: dict[str, Any] | None = None
        """What the generators were when the run was saved within an epoch; for when that loader goes on."""
        self._epoch_rng: dict[str, Any] | None = None
        self._num_epochs: int | None = None
        self._steps_made = 0

    @property
    def step(self) -> int:
        """Completed optimizer steps."""
        return self._place.step

    @property
    def epoch(self) -> int:
        return self._place.epoch

    # -- what the user calls ------------------------------------------------------------------------------------------

    def prepare(self, *objects: Any) -> Any:
        """Models, optimizers, schedulers and DataLoaders, made ready for all workers, in the order given."""
        if self._restored:
            raise LoopError("run.prepare(...) came after the loop had begun; prepare everything before run.epochs")
        prepared = prepare(objects, self._context, self._state, self._heart, self._evaluating)
        self._stop.rearm()
        # From here on each worker draws its own numbers (dropout); the weights were built from the same ones.
        seed_everything(mix(self._context.config.folder.seed, 0x0D0D, self.rank))
        return prepared if len(prepared) != 1 else prepared[0]

    def epochs(self, count: int) -> Iterator[int]:
        """Epoch numbers from 0, or from where the run was when it was last saved."""
        self._num_epochs = count
        self._restore_once()
        while self.epoch < count:
            self._begin_epoch()
            yield self.epoch
            self._place.epoch += 1
            self._place.epoch_under_way = False
            self._epoch_boundary()
        self._check_trained()
        self._save(wait=True)
        self._checkpointer.check_best(self._metrics.latest)

    def steps(self, loader: Loader) -> Iterator[Any]:
        """The loader's batches, each for one step; between two of them the run is saved, if it is time."""
        if not isinstance(loader, Loader):
            found = type(loader).__name__
            raise LoopError(f"run.steps(...) got a {found}; give it a DataLoader that run.prepare returned")
        self._restore_once()
        self._journal.training(self._num_epochs, loader.num_batches)
        if self._stepping:
            yield from self._companion(loader)
            return
        self._stepping = True
        try:
            yield from self._steps(loader)
        finally:
            self._stepping = False
            self._set_batch(None)
            self._heart.enter(IDLE)

    def log(self, **metrics: Any) -> None:
        """Records metrics of this step, or of this epoch: means over the samples of all workers."""
        if self._batch is not None:
            record = Record(self.step + 1, self.epoch, float(self._batch.num_samples), in_step=True)
        else:
            record = Record(self.step, self.epoch, 1.0, in_step=False)
        self._metrics.log(record, metrics, self._part)

    def sum(self, value: Any) -> torch.Tensor:
        """The sum of `value` over all workers."""
        return self._context.collective.sum(value)

    def mean(self, value: Any) -> torch.Tensor:
        """The mean of `value` over all workers."""
        return self._context.collective.mean(value)

    def gather(self, value: Any) -> torch.Tensor:
        """All workers' tensors, end to end along the first dimension."""
        return self._context.collective.gather(value)

    def micro(self, batch: Any, count: int) -> Iterator[Any]:
        """The batch in `count` parts, whose gradients add up; workers exchange them on the last only.

        Divide the loss by `count` before its backward, as in any PyTorch loop.
        """
        parts = in_parts(batch, count)
        if not parts:
            raise LoopError(f"run.micro(batch, {count}) cannot divide {size_of(batch)} sample(s) into {count} part(s)")
        weight = self._batch.weight if self._batch is not None else 1.0
        try:
            for number, (part, self._part) in enumerate(parts, 1):
                self._weigh_gradients(weight * self._part * count)
                if number == count:
                    yield part
                else:
                    yield from self._without_sync(part)
        finally:
            self._part = None
            self._weigh_gradients(weight)

    def backward(self, loss: torch.Tensor) -> None:
        """`loss.backward()`, with the scaling that fp16 needs."""
        scaler = self._state.scaler
        (scaler.scale(loss) if scaler is not None else loss).backward()  # type: ignore[no-untyped-call]
        for optimizer in self._state.optimizers.values():
            optimizer.backward_seen = True

    def clip_grad_norm(self, model: nn.Module, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scales the model's gradient down to `max_norm` over all workers; returns the norm it had."""
        hold = hold_of(model)
        if hold is None:
            raise LoopError(f"run.clip_grad_norm got a {type(model).__name__} that run.prepare was not given")
        for optimizer in self._state.optimizers.values():
            if optimizer.holds(hold):
                optimizer.unscale()
        return hold.clip_grad_norm(max_norm, norm_type)

    def track(self, name: str, value: Any) -> Any:
        """Saves and restores `value` with the run: anything with state_dict() and load_state_dict()."""
        if self._restored:
            raise LoopError(f"run.track({name!r}, ...) came after the loop had begun; track before run.epochs")
        self._state.track(name, value)
        return value

    def save(self, name: str, value: Any) -> None:
        """Writes an artifact into the run folder: text, bytes, JSON values, tensors, a figure, or a file's path."""
        value = whole(value)
        if self.is_main:
            write_artifact(self._context.folder.artifacts, name, value)

    def print(self, *values: Any, **options: Any) -> None:
        """`print`, on rank 0 only."""
        if self.is_main:
            print(*values, **{"flush": True, **options})

    # -- boundaries ---------------------------------------------------------------------------------------------------

    def _steps(self, loader: Loader) -> Iterator[Any]:
        heart = self._heart
        heart.enter(DATA)
        if self._rng_to_restore is not None and loader.resumes_here and self._is_active(loader):
            restore_rng(self._rng_to_restore)
            self._rng_to_restore = None
        self._place.active_loader = self._state.name_of(loader)
        for batch in loader.training_pass():
            self._set_batch(batch)
            self.left_at = None
            if self._fingerprints is not None:
                self._fingerprints.begin(batch)
            heart.enter(STEP if self.step >= self._replay_until else REPLAY)
            try:
                yield batch.data
            except GeneratorExit:
                # A `break`, or an error on its way out: not a boundary, so nothing is saved; but an update that was
                # made counts.
                self.left_at = self.step
                if self._has_stepped():
                    self._complete_step(loader)
                raise
            self._complete_step(loader)
            self._boundary()
            heart.enter(DATA)

    def _companion(self, loader: Loader) -> Iterator[Any]:
        """A second loader within a step (a GAN's noise): it feeds the step but does not count it."""
        for batch in loader.training_pass():
            loader.offset += 1
            if self._fingerprints is not None:
                self._fingerprints.also(batch)
            yield batch.data

    def _complete_step(self, loader: Loader) -> None:
        self._place.step += 1
        self._steps_made += 1
        loader.offset += 1
        if self._has_stepped():
            if self._state.scaler is not None:
                self._state.scaler.update()
            for model in self._state.models.values():
                model.gradients_used()
            for optimizer in self._state.optimizers.values():
                optimizer.stepped = False
        self._heart.beat(self.step)

    def _boundary(self) -> None:
        for model in self._state.models.values():
            model.sync_buffers()
        if self._fingerprints is not None:
            self._fingerprints.write(self.step, self.epoch)
        self._checkpointer.raise_error()
        if self._steps_made == 1:
            self._journal.recovered(self.step, self._recovery)
            self._checkpointer.warm_up()
            self._context.note_imports()
        due, due_to_meet = self._checkpointer.due_at(self.step), self._exchange.step_ended(self.step)
        if due or due_to_meet:
            stop, due_by_time = self._sync()
            if stop or due or due_by_time:
                self._save(wait=stop)
            if stop:
                self._leave()

    def _epoch_boundary(self) -> None:
        stop, due = self._sync()
        improved = self._checkpointer.improves(self._metrics.latest)
        if stop or due or improved:
            self._save(wait=stop)
        if stop:
            self._leave()

    def _leave(self) -> None:
        self.stopped = True
        self._journal.stopped(self.step)
        raise Stopped

    def _sync(self) -> tuple[bool, bool]:
        """Workers exchange what they logged, and agree: (stop now, save now)."""
        agreed = self._exchange.meet(self.step, self._stop.requested, self._checkpointer.due_by_time)
        self._journal.write(agreed.lines, self.step, self.epoch)
        check_numbers(agreed.lines, self._state, self._context.collective)  # before anything is saved
        return agreed.stop, agreed.save

    # -- saving and restoring -----------------------------------------------------------------------------------------

    def _save(self, wait: bool) -> None:
        self._heart.enter(CHECKPOINT)
        self._checkpointer.save(self._place, dict(self._metrics.latest), self._epoch_rng, wait)
        self._heart.enter(IDLE)

    def _restore_once(self) -> None:
        if self._restored:
            return
        self._restored = True
        loaded = self._checkpointer.restore()
        if loaded is not None:
            self._take_up(loaded)
        job = self._context.job
        if job is not None and job.inspected_step:
            Inspector(self._state, job.inspected_step, lambda: self.step)
        self._recovery.mark()

    def _take_up(self, loaded: Loaded) -> None:
        saved = loaded.state["run"]
        self._place = Place(**{name: saved[name] for name in Place.__dataclass_fields__})
        self._metrics.latest = dict(saved["metrics"])
        self._exchange.resume(self.step)
        self._heart.beat(self.step)
        own = loaded.rank_state
        if own is None or loaded.world_size != self.world_size:
            # Another number of workers: streams cannot go on as they were, so each starts one for this step.
            seed_everything(mix(self._context.config.folder.seed, 0x0D0D, self.rank, self.step))
            return
        self._rng_to_restore, self._epoch_rng = own["rng"], own["epoch_rng"]
        restore_rng(own["rng"])

    def _begin_epoch(self) -> None:
        if self._place.epoch_under_way:
            # What stands before `steps` in the epoch's body runs again: it must draw the same numbers again.
            if self._epoch_rng is not None:
                restore_rng(self._epoch_rng)
            return
        self._place.epoch_under_way = True
        self._epoch_rng = capture_rng()
        self._rng_to_restore = None
        for loader in self._state.loaders.values():
            loader.begin_epoch()

    # -- the end ------------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """The script has ended well: saves what is not saved yet, and writes the result."""
        self._check_trained()
        self._sync()
        self._save(wait=True)
        self._journal.finished(self.step, self.epoch, self._metrics.latest, self._heart)
        if not self.is_main:
            self._close_loaders()  # what they were connected to is rank 0's to stop
        self._context.collective.barrier()  # nobody hangs up while another still talks
        self.close()

    def settle(self) -> None:
        """Waits for a save that is being written, after a failure: it is whole, and worth keeping."""
        with suppress(Exception):
            self._checkpointer.wait()

    def tell_failure(self) -> None:
        """Passes on that the script failed to who is not told by a supervisor."""
        self._journal.close_sinks("failed")

    def close(self) -> None:
        """Lets go of everything; nothing is saved."""
        self._close_loaders()
        if self._stacks is not None:
            self._stacks.close()
            self._stacks = None
        self._stop.restore()
        self._journal.close()
        self._context.leave()

    @property
    def has_begun(self) -> bool:
        """Whether a first batch was handed out."""
        return self._steps_made > 0 or self._stepping

    def _check_trained(self) -> None:
        if not self.step:
            raise LoopError("the loop ended without a step: iterate over run.steps(loader), not over the loader itself")

    def _close_loaders(self) -> None:
        for loader in self._state.loaders.values():
            loader.close()

    # -- small parts --------------------------------------------------------------------------------------------------

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Around a pass over a loader that is not a training pass."""
        self._restore_once()
        for model in self._state.models.values():
            model.sync_buffers()
        before = self._heart.phase if self._stepping else IDLE
        self._heart.enter(VALIDATION)
        try:
            yield
        finally:
            self._heart.enter(before)

    def _is_active(self, loader: Loader) -> bool:
        return self._state.name_of(loader) == self._place.active_loader

    def _has_stepped(self) -> bool:
        """Whether an optimizer has stepped in the loop's body."""
        return any(optimizer.stepped for optimizer in self._state.optimizers.values())

    def _set_batch(self, batch: Batch | None) -> None:
        self._batch = batch
        self._weigh_gradients(batch.weight if batch is not None else 1.0)

    def _weigh_gradients(self, weight: float) -> None:
        for model in self._state.models.values():
            model.gradient_weight, model.in_step = weight, self._batch is not None

    def _without_sync(self, part: Any) -> Iterator[Any]:
        with ExitStack() as stack:
            for model in self._state.models.values():
                stack.enter_context(model.no_gradient_sync())
            yield part
