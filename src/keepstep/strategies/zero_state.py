"""Where ZeRO keeps a parameter's fp32 weight and its optimizer state: one worker's interval of each, by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from keepstep.fragment import Fragment


@dataclass(frozen=True)
class Slot:
    """This worker's interval of one parameter, within the flat memory that the optimizer works on."""

    flat: torch.Tensor
    """What the optimizer takes for a parameter: many parameters' intervals, end to end."""
    start: int
    length: int
    shape: torch.Size
    """The parameter's own, whole."""
    begin: int
    """Which of the parameter's numbers is the first of the interval."""
    group: int = 0
    """The one of DeepSpeed's groups that it lies in."""

    def fragment(self, memory: torch.Tensor) -> Fragment:
        """The interval in `flat`, or in something laid out as it is."""
        return Fragment(self.shape, self.begin, memory.detach().narrow(0, self.start, self.length))


def shape_of(parameter: nn.Parameter) -> torch.Size:
    """A parameter's whole shape, also where ZeRO 3 has left nothing of it in its place."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


def slots(zero: Any, parameters: dict[str, nn.Parameter]) -> dict[str, Slot]:
    """The slot of every parameter that the optimizer has, by name; an empty one where it has no part of it."""
    find = _slot_3 if hasattr(zero, "fp32_partitioned_groups_flat") else _slot_12
    found = {name: find(zero, parameter) for name, parameter in parameters.items()}
    return {name: slot for name, slot in found.items() if slot is not None}


def _slot_12(zero: Any, parameter: nn.Parameter) -> Slot | None:
    """Stages 1 and 2: a group's parameters lie end to end, and each worker has an equal part of the row."""
    if not hasattr(parameter, "_hp_mapping"):
        return None  # not the optimizer's
    group = next(n for n, members in enumerate(zero.bit16_groups) if any(p is parameter for p in members))
    flat, mapping = zero.single_partition_of_fp32_groups[group], parameter._hp_mapping
    if mapping is None:  # it lies in another worker's part
        return Slot(flat, 0, 0, parameter.shape, 0)
    here, within = mapping.hp_fragment_address, mapping.lp_fragment_address
    return Slot(flat, here.start, here.numel, parameter.shape, within.start)


def _slot_3(zero: Any, parameter: nn.Parameter) -> Slot | None:
    """Stage 3: each parameter is divided by itself, filled up to equal parts."""
    position = zero.grad_position.get(zero.get_param_id(parameter)) if parameter.requires_grad else None
    if position is None:
        return None
    group, start, part = position
    begin, shape = zero._get_param_partition_rank(parameter) * part, shape_of(parameter)
    length = max(0, min(part, shape.numel() - begin))
    return Slot(zero.fp32_partitioned_groups_flat[group], start, length, shape, begin, group)


def frozen_fragment(zero: Any, parameter: nn.Parameter) -> Fragment | torch.Tensor:
    """A parameter that no optimizer has: as it is, or under stage 3 this worker's part of it."""
    if not hasattr(parameter, "ds_tensor"):
        return parameter.detach()
    part = parameter.ds_tensor.detach().view(-1)
    begin, shape = zero._get_param_partition_rank(parameter) * part.numel(), shape_of(parameter)
    return Fragment(shape, begin, part.narrow(0, 0, max(0, min(part.numel(), shape.numel() - begin))))


def gathered(parameter: nn.Parameter) -> torch.Tensor:
    """A copy of the whole of what stage 3 has divided, in host memory; collective."""
    from deepspeed.runtime.zero import GatheredParameters

    with GatheredParameters([parameter]):
        return parameter.detach().to("cpu", copy=True)


def on_disk(zero: Any, group: int) -> bool:
    """Whether a group's memory lies on a disk between steps."""
    return bool(getattr(zero, "swap_optimizer", False) and zero._swappable_optimizer_subgroup(group))


@contextmanager
def resident(zero: Any, group: int, changes: bool = False) -> Iterator[None]:
    """Within, a group that lies on a disk is in memory; what `changes` is written back."""
    if not on_disk(zero, group):
        yield
        return
    zero._optimizer_states_and_gradient_swap_in(group)
    try:
        yield
    finally:
        if changes:
            zero._optimizer_states_and_gradient_swap_out(group)
        else:
            zero._release_swap_buffers(group)


def refresh_weights(zero: Any) -> None:
    """Gives the model the weights that its fp32 copies now have; collective."""
    if not hasattr(zero, "fp32_partitioned_groups_flat"):
        zero.update_lp_params()
        return
    for group in range(len(zero.fp16_groups)):
        with resident(zero, group):
            zero._reassign_or_swap_out_partitioned_parameters(group)
    if zero.persistent_parameters:  # small ones, which every worker holds whole
        zero.persistent_parameters[0].all_gather(zero.persistent_parameters)
