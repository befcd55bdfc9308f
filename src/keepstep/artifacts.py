"""Writes what `run.save` is given into the run folder, in the format that fits it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from keepstep.checkpoint.store import WRITING
from keepstep.errors import ConfigError


def write_artifact(folder: Path, name: str, value: Any) -> Path:
    """Writes `value` as `folder/name`, whole or not at all; returns the path."""
    target = folder / name
    if Path(name).is_absolute() or ".." in Path(name).parts or not Path(name).name:
        raise ConfigError(f"run.save({name!r}, ...): the name must stay inside the run's artifacts folder")
    writer = _writer(name, value)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f"{WRITING}{target.name}")  # keeps the suffix: figures choose their format by it
    try:
        writer(temporary)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    return target


def _writer(name: str, value: Any) -> Callable[[Path], Any]:
    if isinstance(value, Path):
        return lambda path: shutil.copyfile(value, path)
    if isinstance(value, str):
        return lambda path: path.write_text(value)
    if isinstance(value, (bytes, bytearray)):
        return lambda path: path.write_bytes(value)
    if isinstance(value, torch.Tensor):
        return lambda path: save_file({"tensor": _host(value)}, path)
    if isinstance(value, Mapping) and value and all(isinstance(part, torch.Tensor) for part in value.values()):
        return lambda path: save_file({str(key): _host(part) for key, part in value.items()}, path)
    if hasattr(value, "savefig"):  # a matplotlib figure
        return lambda path: value.savefig(path)
    try:
        text = json.dumps(value, indent=1)
    except (TypeError, ValueError):
        raise ConfigError(
            f"run.save({name!r}, ...) got a {type(value).__name__}; it takes text, bytes, JSON values, tensors, "
            "dicts of tensors, figures with savefig, and pathlib paths of files to copy"
        ) from None
    return lambda path: path.write_text(text)


def whole(value: Any) -> Any:
    """Sharded tensors put together; collective, so every worker calls it, though only rank 0 writes."""
    if isinstance(value, Mapping):
        return {key: whole(part) for key, part in value.items()}
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def _host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().clone()
