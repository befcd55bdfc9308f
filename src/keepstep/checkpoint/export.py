"""Turns a checkpoint into plain weights that `model.load_state_dict` or `from_pretrained` takes."""

from __future__ import annotations

import itertools
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from keepstep.checkpoint.contents import read_contents
from keepstep.checkpoint.files import Layout, nbytes, stream_safetensors
from keepstep.checkpoint.store import WRITING, Store, sync_folder, write_durably
from keepstep.checkpoint.weights import Weights
from keepstep.errors import CheckpointError, ConfigError
from keepstep.standard_json import to_json

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_SHARD = re.compile(r"model-[0-9]{5}-of-[0-9]{5}\.safetensors")


@dataclass(frozen=True)
class Exported:
    """What was written."""

    tensors: int
    files: list[str]
    notes: list[str]


def export(
    store: Store,
    step: int,
    output: Path,
    model: str = "model",
    dtype: str | None = None,
    strip_prefix: str = "",
    shard_bytes: int | None = None,
) -> Exported:
    """Writes one model's weights as a safetensors file, or in shards into a folder, in the Hugging Face layout.

    It is there whole or not at all: what lay there before stays until the new files are complete.
    """
    store.check(step)
    weights = Weights(read_contents(store, step), model, DTYPES[dtype] if dtype else None, strip_prefix)
    metadata = {"format": "pt", "step": str(step)}
    try:
        if shard_bytes is None:
            files = [output.name]
            with _written(weights, output.parent, {output.name: list(weights.layout)}, metadata):
                pass
        else:
            files = _write_shards(weights, output, shard_bytes, metadata)
    except OSError as error:
        raise CheckpointError(f"{output} cannot be written ({error.strerror or error})") from error
    return Exported(len(weights.layout), files, _notes(weights, dtype))


def parse_size(text: str) -> int:
    """`5GB`, `500MiB`: as bytes."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([KMG]i?B)", text)
    size = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    if not size:
        raise ConfigError(f"--shard-size is {text!r}; a size is expected, as 5GB, 500MB or 2GiB")
    return size


def _write_shards(weights: Weights, folder: Path, limit: int, metadata: dict[str, str]) -> list[str]:
    shards = _split(weights.layout, limit)
    if len(shards) == 1:
        files = {_WHOLE: shards[0]}
    else:
        files = {f"model-{n:05d}-of-{len(shards):05d}.safetensors": shard for n, shard in enumerate(shards, start=1)}
    total = sum(itertools.starmap(nbytes, weights.layout.values()))
    weight_map = {name: file for file, names in files.items() for name in names}
    index = to_json({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)
    with _written(weights, folder, files, metadata):
        # Shards of two exports must never stand under one index: better none for the moment of the renames.
        (folder / _INDEX).unlink(missing_ok=True)
    if len(shards) > 1:
        write_durably(folder / _INDEX, index)
    _remove_old_shards(folder, set(files))
    return list(files)


@contextmanager
def _written(weights: Weights, folder: Path, files: dict[str, list[str]], metadata: dict[str, str]) -> Iterator[None]:
    """Writes files of the named tensors beside their places; they take them when the block is left."""
    folder.mkdir(parents=True, exist_ok=True)
    with _temporaries(folder, list(files)) as temporaries:
        for file, names in files.items():
            # Large elements first, as the safetensors package has it: every tensor then begins where it can be mapped.
            names.sort(key=lambda name: -weights.layout[name][0].itemsize)
            layout = {name: weights.layout[name] for name in names}
            stream_safetensors(temporaries[file], layout, weights.stream(names), metadata)
        yield
        for file, temporary in temporaries.items():
            temporary.replace(folder / file)
    sync_folder(folder)


@contextmanager
def _temporaries(folder: Path, files: list[str]) -> Iterator[dict[str, Path]]:
    """Where to write each file to, beside its place; gone afterwards if they were not renamed."""
    mark = uuid.uuid4().hex[:8]
    paths = {file: folder / f"{WRITING}{mark}-{file}" for file in files}
    try:
        yield paths
    finally:
        for path in paths.values():
            path.unlink(missing_ok=True)


def _split(layout: Layout, limit: int) -> list[list[str]]:
    """Names of each shard, in the model's order; a tensor larger than the limit has a shard of its own."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, described in layout.items():
        more = nbytes(*described)
        if shards[-1] and size + more > limit:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += more
    return shards


def _remove_old_shards(folder: Path, new: set[str]) -> None:
    """Those of an export in another number of shards, which no index names any more (as save_pretrained does)."""
    for path in folder.iterdir():
        if path.name not in new and (_SHARD.fullmatch(path.name) or path.name == _WHOLE):
            path.unlink()


def _notes(weights: Weights, dtype: str | None) -> list[str]:
    notes = []
    if weights.left_out:
        notes.append(f"left out, for it is no tensor: {', '.join(weights.left_out)}")
    if weights.infinite:
        notes.append(f"became infinite in {dtype}, for it was too large: {', '.join(weights.infinite)}")
    return notes


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
