"""Routes a model's forward through its strategy, while the user keeps the very same model object."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from keepstep.errors import LoopError

if TYPE_CHECKING:
    from keepstep.strategies.base import PreparedModel

_HOLD = "_keepstep"
_BASE = "_keepstep_base"


def adopt(module: nn.Module, hold: PreparedModel) -> Callable[..., Any]:
    """Makes `module(...)` call `hold.forward`; returns the model's original forward.

    The class is replaced by a subclass, as FSDP2 does, rather than the instance's attribute: attributes, methods,
    `isinstance` and `state_dict` stay the user's, there is no `.module` to remember, and a deep copy (an EMA)
    finds no hold on it and runs its own forward on its own weights.
    """
    base = getattr(type(module), _BASE, type(module))  # a copy of a prepared model has a prepared class already
    if hold.enters_by_call:
        return _adopt_call(module, hold, base)
    original = module.__dict__.pop("forward", None) or MethodType(base.forward, module)

    @functools.wraps(base.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        held = self.__dict__.get(_HOLD)
        if held is None or held.module is not self:
            return base.forward(self, *args, **kwargs)
        return held.forward(*args, **kwargs)

    members = {"forward": forward, "__module__": base.__module__, _BASE: base}
    module.__class__ = type(base.__name__, (base,), members)
    module.__dict__[_HOLD] = hold
    return original


def _adopt_call(module: nn.Module, hold: PreparedModel, base: type[nn.Module]) -> Callable[..., Any]:
    """The same one level further out, before the module's hooks: for a strategy that hangs its own on the model."""

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        held = self.__dict__.get(_HOLD)
        if held is None or held.module is not self:
            return base.__call__(self, *args, **kwargs)
        if held.is_entered:
            with held.arithmetic():  # here, for DeepSpeed switches off what was switched on outside of it
                return base.__call__(self, *args, **kwargs)
        return held.forward(*args, **kwargs)

    members = {"__call__": call, "__module__": base.__module__, _BASE: base}
    module.__class__ = type(base.__name__, (base,), members)
    module.__dict__[_HOLD] = hold
    return MethodType(base.__call__, module)


def hold_of(module: nn.Module) -> PreparedModel | None:
    """The strategy's hold on a model, if it has been prepared."""
    hold: PreparedModel | None = module.__dict__.get(_HOLD)
    return hold if hold is not None and hold.module is module else None


class _ScaledGradient(torch.autograd.Function):
    """The identity, whose gradient is multiplied by a constant."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0] * ctx.factor, None


def has_gradient(values: Any) -> bool:
    """Whether any tensor in it takes part in backward."""
    return any(isinstance(value, torch.Tensor) and value.requires_grad for value in pytree.tree_leaves(values))


def scale_gradient(values: Any, factor: float) -> Any:
    """Multiplies the gradient that flows back through the tensors in `values`."""

    def scale(value: Any) -> Any:
        if not (isinstance(value, torch.Tensor) and value.requires_grad):
            return value
        return _ScaledGradient.apply(value, factor)  # type: ignore[no-untyped-call]

    return pytree.tree_map(scale, values)


def weighted(module: nn.Module, run: Callable[..., Any], weight: float, args: Any, kwargs: Any) -> Any:
    """Runs a model so that the gradient of its parameters counts `weight` times.

    Workers average their gradients as if each had as many samples. Where one has more or fewer, its share is put
    right here, before any strategy's own communication, so that no strategy needs to know of it. What flows on to
    the inputs is put back, for another model that made them weighs its own.
    """
    if weight:
        args, kwargs = scale_gradient((args, kwargs), 1 / weight)
    output = run(*args, **kwargs)
    if not has_gradient(output) and any(parameter.requires_grad for parameter in module.parameters()):
        raise LoopError(
            f"an uneven batch needs its gradient weighted, but the model returned a {type(output).__name__} in which "
            "no tensor has a gradient; return tensors, tuples or dicts, or set drop_last=True"
        )
    return scale_gradient(output, weight)


def to_float32(output: Any) -> Any:
    """Brings a model's 16-bit outputs back to fp32, so that the loss is computed in it."""
    return pytree.tree_map(_float32, output)


def _float32(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16):
        return value.float()
    return value


class Inner(nn.Module):
    """What DDP and FSDP wrap: the user's model, entered at its original forward, so that its hooks run once."""

    def __init__(self, model: nn.Module, compute: Callable[..., Any]) -> None:
        super().__init__()
        self.model, self._compute = model, compute

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._compute(*args, **kwargs)


class ReversedInner(Inner):
    """Names its parts last first: about the order in which backward makes their gradients."""

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        yield from reversed(list(super().named_modules(*args, **kwargs)))
