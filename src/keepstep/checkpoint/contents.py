"""What a checkpoint says of itself, read whole and found to fit together before a tensor is made of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from keepstep.checkpoint.dcp import Reader, rank_file
from keepstep.checkpoint.saver import STATE
from keepstep.checkpoint.store import Manifest, Store
from keepstep.checkpoint.tree import put_together, tensor_keys
from keepstep.checkpoint.untrusted import read_json
from keepstep.errors import CheckpointError


@dataclass(frozen=True)
class Contents:
    """A checkpoint, less the values of its tensors."""

    manifest: Manifest
    reader: Reader
    skeleton: dict[str, Any]
    """The state taken apart: JSON that names the tensors."""

    def check_state(self) -> None:
        """Raises if the state could not be put together."""
        self._try(self.skeleton)

    def check_worker(self, rank: int) -> None:
        """Raises if what one worker stored for itself could not be put together."""
        self._try(self.reader.rank_state(rank))

    def check_workers(self) -> None:
        for rank in range(self.manifest.world_size):
            if rank_file(rank) not in self.manifest.files:  # also ends the loop where the number is a lie
                raise CheckpointError(f"it is of {self.manifest.world_size} workers and has no {rank_file(rank)}")
            self.check_worker(rank)

    def _try(self, json: Any) -> None:
        """Puts it together with tensors of one element each, stretched to their shapes: it costs no memory."""
        stand_ins = {}
        for key in tensor_keys(json):
            shape, dtype = self.reader.shape_and_dtype(key)
            stand_ins[key] = torch.zeros((), dtype=dtype).expand(shape)
        put_together(json, stand_ins)


def read_contents(store: Store, step: int) -> Contents:
    """Raises a CheckpointError, and nothing else, if the checkpoint is not what a run has written."""
    manifest, folder = store.read_manifest(step), store.path(step)
    if manifest.step != step:
        raise CheckpointError(f"{folder.name} is of step {manifest.step}, by its manifest; its folder was renamed")
    sizes = {name: record.bytes for name, record in manifest.files.items()}
    if STATE not in sizes:
        raise CheckpointError(f"{folder.name} has no {STATE}, by its manifest")
    reader = Reader(folder, sizes)
    skeleton = read_json(folder / STATE, sizes[STATE])
    if not isinstance(skeleton, dict):
        raise CheckpointError(f"{folder.name}/{STATE} is no JSON object")
    return Contents(manifest, reader, skeleton)


def check_contents(store: Store, step: int, rank: int | None = None) -> None:
    """Raises if the checkpoint cannot be put together: for one worker, or for all that have written it."""
    try:
        contents = read_contents(store, step)
        contents.check_state()
        if rank is None:
            contents.check_workers()
        else:
            contents.check_worker(rank)
    except CheckpointError as error:
        name = store.path(step).name
        raise type(error)(str(error) if str(error).startswith(name) else f"{name}: {error}") from None
