"""A loss that is no number any more: whether the weights still are and, in another attempt, which tensor was first.

What made it so happened steps ago when it is seen, and looking at every tensor of every step would cost too much. But
the run can be brought back to that very step, exactly: so it is, and only then is everything looked at.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from keepstep.collective import Collective
from keepstep.errors import NotFinite
from keepstep.state import TrainingState


def check_numbers(lines: list[dict[str, Any]], state: TrainingState, collective: Collective) -> None:
    """Raises NotFinite if what was logged is no number, and the weights are none either: nothing good can follow.

    `lines`: reduced over the workers, so that all decide the same.
    """
    bad = next(((line, name) for line in lines for name, value in line.items() if not math.isfinite(value)), None)
    if bad is None:
        return
    spoilt = next((name for name, tensor in _weights(state) if not _is_finite(tensor)), None)
    if any(collective.objects(spoilt)):
        line, name = bad
        raise NotFinite(line["step"], f"{name} is {line[name]} in step {line['step']}, and so are the weights now")


class Inspector:
    """Looks at everything that the models and optimizers make, in the step in which the loss became no number and the
    one before, and raises at the first tensor that is none."""

    def __init__(self, state: TrainingState, inspected_step: int, completed_steps: Callable[[], int]) -> None:
        self._state, self._inspected, self._completed = state, inspected_step, completed_steps
        self._gradient: str | None = None
        """The first gradient that was no number in this step; a scaler of fp16 passes over such a step."""
        for model_name, model in state.models.items():
            for name, module in model.module.named_modules():
                module.register_forward_hook(self._after_forward(name or model_name))
        for prepared in state.optimizers.values():
            prepared.optimizer.register_step_pre_hook(self._before_update)
            prepared.optimizer.register_step_post_hook(self._after_update)

    @property
    def _step(self) -> int:
        """The step under way."""
        return self._completed() + 1

    def _after_forward(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def look(module: nn.Module, inputs: Any, output: Any) -> None:
            if self._step < self._inspected or all(map(_has_no_nan, _tensors(output))):
                return
            arrived, module_name = _tensors(inputs), f"{name!r} ({type(module).__name__})"
            if not all(map(_has_no_nan, arrived)):
                raise self._found(f"the input of {module_name}: it comes so from the data, or code between modules")
            largest = max((float(tensor.detach().abs().max()) for tensor in arrived if tensor.numel()), default=0.0)
            raise self._found(f"the output of {module_name}, whose input is at most {largest:.3g}")

        return look

    def _before_update(self, *_: Any) -> None:
        if self._step >= self._inspected - 1:
            gradients = ((name, tensor.grad) for name, tensor in _weights(self._state) if tensor.grad is not None)
            self._gradient = next((name for name, gradient in gradients if not _is_finite(gradient)), None)

    def _after_update(self, *_: Any) -> None:
        if self._step < self._inspected - 1:
            return
        spoilt = next((name for name, tensor in _weights(self._state) if not _is_finite(tensor)), None)
        if spoilt is not None and self._gradient is not None:
            raise self._found(f"the gradient of {self._gradient!r}, behind a forward whose outputs all were numbers")
        if spoilt is not None:
            raise self._found(f"{spoilt!r} itself after the optimizer's update, whose gradients all were numbers")

    def _found(self, what: str) -> NotFinite:
        return NotFinite(self._step, f"the first tensor that is no number any more, in step {self._step}, is {what}")


def _weights(state: TrainingState) -> Iterator[tuple[str, torch.Tensor]]:
    for model in state.models.values():
        yield from model.named_parameters().items()


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _is_finite(tensor: torch.Tensor) -> bool:
    return bool(torch.isfinite(_here(tensor)).all())


def _has_no_nan(tensor: torch.Tensor) -> bool:
    """Infinity is let pass where a module gives it out: masks are made of it."""
    return not tensor.is_floating_point() or not bool(torch.isnan(_here(tensor)).any())


def _here(tensor: torch.Tensor) -> torch.Tensor:
    """This worker's part."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach()
