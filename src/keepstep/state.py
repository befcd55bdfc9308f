"""What a checkpoint holds: everything that makes the next step what it would have been."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from keepstep.checkpoint.store import Store, newest_first
from keepstep.checkpoint.tree import Tensors, put_together, split_path, take_apart, tensor_keys
from keepstep.collective import Collective
from keepstep.data.loader import Loader
from keepstep.data.order import Stateful
from keepstep.errors import CheckpointError, CheckpointUnreadable, ConfigError, KeepstepError
from keepstep.strategies.base import PreparedModel, Scaler
from keepstep.strategies.optimizer import PreparedOptimizer


@dataclass
class TrainingState:
    """Every object that `prepare` and `track` were given, by the name it has in checkpoints."""

    models: dict[str, PreparedModel] = field(default_factory=dict)
    optimizers: dict[str, PreparedOptimizer] = field(default_factory=dict)
    schedulers: dict[str, Stateful] = field(default_factory=dict)
    loaders: dict[str, Loader] = field(default_factory=dict)
    tracked: dict[str, Stateful] = field(default_factory=dict)
    scaler: Scaler | None = None

    @staticmethod
    def next_name(kind: str, taken: Mapping[str, Any]) -> str:
        """model, model_2, model_3: by the order in which they are prepared, which is the same in every run."""
        return kind if not taken else f"{kind}_{len(taken) + 1}"

    def name_of(self, loader: Loader) -> str:
        return next(name for name, known in self.loaders.items() if known is loader)

    def track(self, name: str, value: Any) -> None:
        if not isinstance(value, Stateful):
            raise ConfigError(
                f"run.track({name!r}, ...) got a {type(value).__name__}, which lacks state_dict() or load_state_dict()"
            )
        if name in self.tracked:
            raise ConfigError(f"run.track({name!r}, ...) was called twice; give each object a name of its own")
        self.tracked[name] = value

    def capture(self) -> dict[str, Any]:
        return {
            **{name: model.state() for name, model in self.models.items()},
            **{name: optimizer.state_dict() for name, optimizer in self.optimizers.items()},
            "schedulers": {name: scheduler.state_dict() for name, scheduler in self.schedulers.items()},
            "loaders": {name: loader.state_dict() for name, loader in self.loaders.items()},
            "tracked": {name: value.state_dict() for name, value in self.tracked.items()},
            "scaler": self.scaler.state_dict() if self.scaler is not None else None,
        }

    def check_fits(self, skeleton: dict[str, Any], where: str) -> None:
        """Raises, before anything is changed, if the checkpoint is of other objects than these."""
        parts = (*self.models, *self.optimizers, "schedulers", "loaders", "tracked")
        if strange := [part for part in parts if not isinstance(skeleton.get(part, {}), dict)]:
            raise CheckpointError(f"{where} holds no names under '{strange[0]}'; it was not written by keepstep")
        for name, model in self.models.items():
            saved, here = set(skeleton.get(name, {})), set(model.state())
            if saved != here:
                missing, extra = sorted(here - saved), sorted(saved - here)
                raise CheckpointError(
                    f"{where} is of another model: it lacks {len(missing)} of this model's tensors"
                    f"{_first(missing)} and has {len(extra)} that this model lacks{_first(extra)}; "
                    "start this one under another --name"
                )
        for kind in ("schedulers", "loaders"):
            saved, here = set(skeleton.get(kind, ())), set(getattr(self, kind))
            if saved != here:
                raise CheckpointError(
                    f"{where} has {kind} {sorted(saved)}, this script prepares {sorted(here)}; it is of another script"
                )
        for name in self.optimizers:
            if name not in skeleton:
                raise CheckpointError(f"{where} has no {name}; it is of another script")

    def targets(self, skeleton: dict[str, Any], reader: Any, where: str) -> Tensors:
        """Where to load each tensor: into the model's own memory, or into new memory laid out as it will be used."""
        live: Tensors = {}
        for name, model in self.models.items():
            take_apart(model.state(), name, live)
        in_place = set(live)
        take_apart({name: value.state_dict() for name, value in self.tracked.items()}, "tracked", live)
        targets: Tensors = {}
        for key in tensor_keys(skeleton):
            shape, dtype = reader.shape_and_dtype(key)
            if key in in_place:
                if live[key].shape != shape:
                    raise CheckpointError(
                        f"{where} is of another model: '{key}' is {tuple(shape)} there and {tuple(live[key].shape)} "
                        "here; start this one under another --name"
                    )
                targets[key] = live[key]
            elif optimizer := self.optimizers.get(key.partition("/")[0]):
                targets[key] = self._optimizer_target(optimizer, key, shape, dtype)
            elif key in live and hasattr(live[key], "device_mesh") and live[key].shape == shape:
                targets[key] = torch.empty_like(live[key], dtype=dtype)
            else:
                device = live[key].device if key in live else None
                targets[key] = torch.empty(shape, dtype=dtype, device=device)
        if lost := sorted(in_place - set(targets)):  # the model would silently keep what it was made with
            raise CheckpointError(f"{where} does not say where it holds '{lost[0]}'; it was not written by keepstep")
        return targets

    @staticmethod
    def _optimizer_target(optimizer: PreparedOptimizer, key: str, shape: torch.Size, dtype: torch.dtype) -> Any:
        parts = split_path(key)
        if len(parts) == 5 and parts[1] == "state":  # optimizer/state/<model>/<parameter>/<what>
            with contextlib.suppress(KeyError):  # of a parameter that is not here: the optimizer says so when it loads
                return optimizer.target(parts[2], parts[3], parts[4], shape, dtype)
        return torch.empty(shape, dtype=dtype)

    def apply(self, state: dict[str, Any]) -> None:
        for name, model in self.models.items():
            _hand_over(name, model.load_state, state[name])
        for name, optimizer in self.optimizers.items():
            _hand_over(name, optimizer.load_state_dict, state[name])
        for name, scheduler in self.schedulers.items():
            _hand_over(name, scheduler.load_state_dict, state["schedulers"][name])
        for name, loader in self.loaders.items():
            _hand_over(name, loader.load_state_dict, state["loaders"][name])
        for name, value in self.tracked.items():
            if name in state.get("tracked", ()):
                _hand_over(name, value.load_state_dict, state["tracked"][name])
        if self.scaler is not None and state.get("scaler") is not None:
            _hand_over("scaler", self.scaler.load_state_dict, state["scaler"])


@dataclass(frozen=True)
class Loaded:
    """A checkpoint that was read."""

    step: int
    state: dict[str, Any]
    rank_state: dict[str, Any] | None
    """What this rank stored for itself; None where the saved run had no such rank."""
    world_size: int


def newest_good(
    store: Store, collective: Collective, rank: int, world_size: int, fetches: bool = True
) -> tuple[int | None, list[str]]:
    """The newest checkpoint that is whole, the same on every worker, and why newer ones were passed over.

    Raises where it cannot be known whether the newest is whole: a disk that does not answer, or is not for us to read,
    is no reason to make steps again. `fetches`: whether this worker is the one that fetches for its machine what lies
    in an object store.
    """
    passed_over: list[str] = []
    for step in collective.from_rank0(list(newest_first(store)) if rank == 0 else []):
        problems = []
        if store.mirror is not None:
            problem = _fetch_problem(store, step) if fetches else None
            problems = [found for found in collective.objects(problem) if found]
        if not problems:
            problem = _problem(store, step, rank, world_size)
            problems = [found for found in collective.objects(problem) if found]
        if not problems:
            return step, passed_over
        if all(isinstance(problem, CheckpointUnreadable) for problem in problems):
            raise CheckpointUnreadable(f"{problems[0]}; it may well be good, so nothing was changed: {_SEE_TO_IT}")
        passed_over.append(str(next(found for found in problems if not isinstance(found, CheckpointUnreadable))))
    return None, passed_over


_SEE_TO_IT = "see to that, then start the same command again"


def _fetch_problem(store: Store, step: int) -> CheckpointError | None:
    try:
        store.fetch(step)
    except CheckpointError as error:
        return error
    except OSError as error:  # of this machine's disk, which says nothing of the checkpoint
        return CheckpointUnreadable(f"{store.path(step).name} could not be fetched ({error})")
    return None


def _problem(store: Store, step: int, rank: int, world_size: int) -> CheckpointError | None:
    from keepstep.checkpoint.contents import check_contents

    try:
        store.check(step, rank, world_size)
        check_contents(store, step, rank)
    except CheckpointError as error:
        return error
    return None


def load(store: Store, step: int, training: TrainingState, rank: int) -> Loaded:
    """Reads a checkpoint into the training state; every worker for itself."""
    from keepstep.checkpoint.contents import read_contents

    where = f"the checkpoint {store.path(step).name}"
    contents = read_contents(store, step)
    reader, skeleton = contents.reader, contents.skeleton
    training.check_fits(skeleton, where)
    targets = training.targets(skeleton, reader, where)
    own = reader.rank_state(rank)
    for key in set(tensor_keys(own)) - set(targets):
        shape, dtype = reader.shape_and_dtype(key)
        targets[key] = torch.empty(shape, dtype=dtype)
    reader.load(targets)
    state = {key: put_together(part, targets) for key, part in skeleton.items()}
    training.apply(state)
    return Loaded(step, state, put_together(own, targets) if own is not None else None, contents.manifest.world_size)


def _hand_over(name: str, take: Callable[[Any], Any], part: Any) -> None:
    try:
        take(part)
    except KeepstepError:
        raise
    except Exception as error:  # whatever an object makes of a state that is not its own
        raise CheckpointError(f"{name} does not take the state that was saved for it: {error!r}") from error


def _first(names: list[str]) -> str:
    if not names:
        return ""
    return f" (as {names[0] if names[0].isprintable() else ascii(names[0])})"
