"""Turns a checkpoint into plain weights that `model.load_state_dict` takes."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from keepstep.checkpoint.dcp import Reader
from keepstep.checkpoint.files import write_safetensors
from keepstep.checkpoint.saver import STATE
from keepstep.checkpoint.store import Store
from keepstep.checkpoint.tree import Tensors, split_path, tensor_keys
from keepstep.errors import CheckpointError


def export(store: Store, step: int, output: Path, model: str = "model") -> int:
    """Writes one model's weights as a safetensors file; returns how many tensors there were."""
    store.check(step)
    folder = store.path(step)
    skeleton = json.loads((folder / STATE).read_text())
    if model not in skeleton:
        models = sorted(name for name in skeleton if name.startswith("model"))
        raise CheckpointError(f"{folder.name} has no {model!r}; it has {', '.join(models) or 'no model'}")
    reader = Reader(folder)
    targets: Tensors = {}
    for key in tensor_keys(skeleton[model]):
        shape, dtype = reader.shape_and_dtype(key)
        targets[key] = torch.empty(shape, dtype=dtype)
    reader.load(targets)
    weights = {"/".join(split_path(key)[1:]): tensor for key, tensor in targets.items()}  # less the model's name
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = output.with_name(f".writing-{output.name}")
    try:
        write_safetensors(temporary, weights, {"format": "pt", "step": str(step)})
        temporary.replace(output)
    finally:
        temporary.unlink(missing_ok=True)
    return len(weights)


def choose_step(store: Store, which: str) -> int:
    """`newest`, `best`, or a step number, as a step that has a checkpoint."""
    steps = store.steps()
    there_are = f"there are steps {', '.join(map(str, steps))}"
    if not steps:
        raise CheckpointError(f"there is no checkpoint in {store.root}")
    if which == "newest":
        return steps[-1]
    if which == "best":
        best = store.best()
        if best is None:
            raise CheckpointError("the run kept no best checkpoint; it does with --keep-best METRIC:max")
        if best["step"] not in steps:  # it is noted before its checkpoint is written: a crash came between
            raise CheckpointError(f"the best checkpoint, of step {best['step']}, is not there; {there_are}")
        return int(best["step"])
    if which.isdecimal() and int(which) in steps:
        return int(which)
    raise CheckpointError(f"there is no checkpoint {which!r}; {there_are}")
