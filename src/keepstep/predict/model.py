"""The model to predict with: the user's, with a checkpoint's weights in it."""

from __future__ import annotations

from collections.abc import Set

import torch
from torch import nn

from keepstep.checkpoint.contents import Contents, read_contents
from keepstep.checkpoint.store import Store
from keepstep.checkpoint.tree import Tensors, put_together, tensor_keys
from keepstep.checkpoint.weights import Weights
from keepstep.errors import CheckpointError

_SHOWN = 4


def load_weights(model: nn.Module, store: Store, step: int, name: str) -> None:
    """Copies the weights into the model's own tensors, a few at a time; raises unless each has its counterpart."""
    store.check(step)
    contents = read_contents(store, step)
    weights = Weights(contents, name)
    own = model.state_dict()
    _check_names(own.keys() - weights.left_out, weights.layout.keys(), f"step {step}")
    tensors = {key: value for key, value in own.items() if key in weights.layout}
    _check_shapes(tensors, weights)
    with torch.no_grad():
        for target, saved in zip(tensors.values(), weights.stream(tensors), strict=True):
            target.copy_(saved)
    if weights.left_out:
        model.load_state_dict({key: _extra(contents, name, key) for key in weights.left_out}, strict=False)


def _extra(contents: Contents, name: str, key: str) -> object:
    """What a module keeps beside its tensors (`get_extra_state`)."""
    described = contents.skeleton[name][key]
    parts: Tensors = {}
    for part in tensor_keys(described):
        shape, dtype = contents.reader.shape_and_dtype(part)
        parts[part] = torch.empty(shape, dtype=dtype)
    contents.reader.load(parts)
    return put_together(described, parts)


def _check_names(own: Set[str], saved: Set[str], where: str) -> None:
    problems = [
        f"{what} {len(names)} tensors ({_some(names)})"
        for what, names in (("the checkpoint lacks", own - saved), ("the model lacks", saved - own))
        if names
    ]
    if problems:
        raise CheckpointError(
            f"make_model's model is not the one of {where}: {'; '.join(problems)}. Make it as the training script did, "
            "or name another one of the run's with --model"
        )


def _check_shapes(own: dict[str, torch.Tensor], weights: Weights) -> None:
    wrong = [
        f"{name} is {tuple(tensor.shape)}, saved was {tuple(weights.layout[name][1])}"
        for name, tensor in own.items()
        if tensor.shape != weights.layout[name][1]
    ]
    if wrong:
        more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise CheckpointError(
            f"make_model's model has other shapes than the checkpoint: {'; '.join(wrong[:_SHOWN])}{more}. Make it as "
            "the training script did"
        )


def _some(names: Set[str]) -> str:
    return ", ".join(sorted(names)[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
