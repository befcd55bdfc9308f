"""Gives layers their inputs in the 16 bits of their weights, where something in the model has made them wider."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

_LAYERS = (nn.Linear, nn.Bilinear, _ConvNd, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
_HALVES = (torch.bfloat16, torch.float16)


def follow_weights(model: nn.Module) -> None:
    """Makes torch's own layers take inputs of any width, once their weights have 16 bits.

    A buffer stays fp32, and what is added to it becomes so: the next layer would refuse it. Autocast alone does not
    help, for on the CPU it leaves norms as they are.
    """
    for module in model.modules():
        if isinstance(module, _LAYERS) and isinstance(module.weight, nn.Parameter):
            module.register_forward_pre_hook(_in_weights_type, with_kwargs=True)


def _in_weights_type(module: nn.Module, args: Any, kwargs: Any) -> Any:
    dtype = module.weight.dtype
    if dtype not in _HALVES or not (any(map(_is_wide, args)) or any(map(_is_wide, kwargs.values()))):
        return None  # a copy of the model, an EMA, has whole weights; and mostly there is nothing to do
    narrowed = tuple(value.to(dtype) if _is_wide(value) else value for value in args)
    return narrowed, {name: value.to(dtype) if _is_wide(value) else value for name, value in kwargs.items()}


def _is_wide(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.float32
