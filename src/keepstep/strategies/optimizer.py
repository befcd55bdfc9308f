"""Keeps an optimizer in touch with its parameters: through sharding, fp16 scaling, saving and loading, by name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn

from keepstep.errors import CheckpointError, ConfigError, LoopError
from keepstep.strategies.base import PreparedModel, Scaler

Names = dict[nn.Parameter, tuple[str, str]]
"""Parameter → (model's name, parameter's name in it)."""


class PreparedOptimizer:
    """The run's hold on one optimizer. The user keeps the optimizer object itself, and its schedulers stay valid."""

    def __init__(self, optimizer: torch.optim.Optimizer, scaler: Scaler | None) -> None:
        self.optimizer, self.scaler = optimizer, scaler
        self.stepped = False
        """Whether `step` was called since the last boundary."""
        self.backward_seen = False
        """Whether `run.backward` was called since the last `step`."""
        self._models: dict[str, PreparedModel] = {}
        self._group_names: list[list[tuple[str, str]]] = []
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._note_step)
        if scaler is not None:
            self._scale_steps(scaler)

    def remember_names(self, parameters: dict[str, dict[str, nn.Parameter]]) -> None:
        """Before sharding replaces parameters: notes which ones the optimizer has, by model and name."""
        names = _names_of(parameters)
        for group in self.optimizer.param_groups:
            unknown = [p for p in group["params"] if p not in names]
            if unknown:
                raise ConfigError(
                    f"the optimizer {type(self.optimizer).__name__} holds {len(unknown)} parameter(s) that are in no "
                    f"prepared model (the first has shape {tuple(unknown[0].shape)}); "
                    "pass the model they belong to to the same run.prepare(...)"
                )
            self._group_names.append([names[p] for p in group["params"]])
        if any(float(state.get("step", 1)) > 0 for state in self.optimizer.state.values()):
            raise ConfigError("the optimizer has stepped before run.prepare(...); prepare it before it steps")

    def reconnect(self, models: dict[str, PreparedModel]) -> None:
        """After sharding: puts the parameters that took the old ones' places into the optimizer's groups."""
        self._models = models
        by_name = {name: model.named_parameters() for name, model in models.items()}
        early = dict(self.optimizer.state)  # some optimizers (Adagrad) make their state before the first step
        self.optimizer.state.clear()
        for group, names in zip(self.optimizer.param_groups, self._group_names, strict=True):
            old, group["params"] = group["params"], [by_name[model][name] for model, name in names]
            for before, after in zip(old, group["params"], strict=True):
                if before in early:
                    self.optimizer.state[after] = {k: _laid_out(v, after) for k, v in early[before].items()}

    def holds(self, model: PreparedModel) -> bool:
        """Whether any of the model's parameters are the optimizer's."""
        return any(self._models[name] is model for names in self._group_names for name, _ in names)

    def unscale(self) -> None:
        """fp16: brings gradients back to size, once a step."""
        if isinstance(self.scaler, torch.amp.GradScaler) and self.backward_seen:
            stage = self.scaler._per_optimizer_states[id(self.optimizer)]["stage"]
            if stage.name == "READY":
                self.scaler.unscale_(self.optimizer)

    def state_dict(self) -> dict[str, Any]:
        """State by model and parameter name, and the groups' hyperparameters."""
        groups = []
        for group, names in zip(self.optimizer.param_groups, self._group_names, strict=True):
            hyper = {key: value for key, value in group.items() if key != "params"}
            groups.append({**hyper, "params": [list(name) for name in names]})
        used = {model for names in self._group_names for model, _ in names}
        state = {name: self._models[name].optimizer_state(self.optimizer) for name in sorted(used)}
        return {"state": state, "groups": groups}

    def target(self, model: str, parameter: str, what: str, shape: torch.Size, dtype: torch.dtype) -> Any:
        """Where to load a piece of a parameter's state into."""
        return self._models[model].optimizer_target(self.optimizer, parameter, what, shape, dtype)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        saved = [[tuple(name) for name in group["params"]] for group in state["groups"]]
        if saved != self._group_names:
            raise CheckpointError(
                f"the checkpoint's optimizer has {[len(g) for g in saved]} parameters in its groups, this one has "
                f"{[len(g) for g in self._group_names]}, or they are named otherwise; it belongs to another script"
            )
        by_name: dict[tuple[str, str], Any] = {}
        for model, values in state["state"].items():
            loaded = self._models[model].load_optimizer_state(self.optimizer, values)
            if loaded is None:
                self._set_hyperparameters(state["groups"])
                return
            by_name.update({(model, name): value for name, value in loaded.items()})
        numbered: dict[int, Any] = {}
        groups, number = [], 0
        for group, names in zip(state["groups"], self._group_names, strict=True):
            numbers = range(number, number + len(names))
            number += len(names)
            numbered.update({n: by_name[name] for n, name in zip(numbers, names, strict=True) if name in by_name})
            groups.append({**group, "params": list(numbers)})
        self.optimizer.load_state_dict({"state": numbered, "param_groups": groups})

    def _set_hyperparameters(self, groups: list[dict[str, Any]]) -> None:
        for group, saved in zip(self.optimizer.param_groups, groups, strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})

    def route_steps(self, instead: Callable[..., Any]) -> None:
        """Makes `optimizer.step()` call `instead`, which may call it back for the plain one."""
        plain = self.optimizer.step
        inside = False

        @functools.wraps(plain)
        def step(_: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            if inside:
                return plain(*args, **kwargs)
            inside = True
            try:
                result = instead(*args, **kwargs)
            finally:
                inside = False
            self.stepped = True  # also where fp16 overflowed, and nothing was changed
            return result

        # A method, as a scheduler that is made later expects to find.
        self.optimizer.step = MethodType(step, self.optimizer)  # type: ignore[method-assign]

    def _before_step(self, *_: Any) -> None:
        for model in {model for names in self._group_names for model, _ in names}:
            self._models[model].check_averaged()

    def _note_step(self, *_: Any) -> None:
        self.stepped = True

    def _scale_steps(self, scaler: Scaler) -> None:
        def step(*args: Any, **kwargs: Any) -> Any:
            if not self.backward_seen:
                raise LoopError("fp16 needs run.backward(loss) in place of loss.backward(): its loss must be scaled")
            self.backward_seen = False
            return scaler.step(self.optimizer, *args, **kwargs)

        self.route_steps(step)


def _laid_out(value: Any, parameter: nn.Parameter) -> Any:
    """A piece of a parameter's state, on the parameter's device and sharded as it is."""
    if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
        return value
    if hasattr(parameter, "device_mesh"):
        from torch.distributed.tensor import DTensor, distribute_tensor

        assert isinstance(parameter, DTensor)
        return distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements)
    return value.to(parameter.device)


def _names_of(parameters: dict[str, dict[str, nn.Parameter]]) -> Names:
    names: Names = {}
    for model, named in parameters.items():
        for name, parameter in named.items():
            names.setdefault(parameter, (model, name))
    return names
