"""PyTorch's distributed checkpoint (DCP) with storage of its own: safetensors and JSON in place of its pickles."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.distributed.checkpoint.utils import find_state_dict_object
from torch.futures import Future

from keepstep.checkpoint.files import DTYPES, dtype_name, write_safetensors
from keepstep.checkpoint.store import FileRecord
from keepstep.checkpoint.tree import Tensors
from keepstep.errors import CheckpointError

INDEX = "tensors.json"


class Snapshot:
    """This worker's part of the state, copied to host memory: training may go on while it is written."""

    def __init__(self) -> None:
        self._buffers: dict[MetadataIndex, torch.Tensor] = {}
        self.plan = SavePlan([])

    def take(self, tensors: Tensors, is_coordinator: bool) -> None:
        """Copies the tensors; the host memory is kept for the next time."""
        self.plan = create_default_local_save_plan(tensors, is_coordinator)
        uses_gpu = False
        for item in self.plan.items:
            source = find_state_dict_object(tensors, item.index).detach()
            uses_gpu = uses_gpu or source.is_cuda
            self._buffer(item.index, source).copy_(source, non_blocking=True)
        if uses_gpu:
            torch.cuda.synchronize()

    def tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self._buffers[index]

    def _buffer(self, index: MetadataIndex, like: torch.Tensor) -> torch.Tensor:
        buffer = self._buffers.get(index)
        if buffer is None or buffer.shape != like.shape or buffer.dtype != like.dtype:
            # A plain contiguous copy: strides are the strategy's affair, not the checkpoint's.
            buffer = torch.empty(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)
            self._buffers[index] = buffer
        return buffer


class _SnapshotPlanner(DefaultSavePlanner):
    """Plans from a snapshot that was taken before, rather than from live tensors."""

    def __init__(self, snapshot: Snapshot) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._snapshot = snapshot

    def create_local_plan(self) -> SavePlan:
        self.plan = self._snapshot.plan
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        return self._snapshot.tensor(write_item.index)


@dataclass(frozen=True)
class _Place:
    """Where a piece of a tensor lies."""

    file: str
    name: str


class _Writer(StorageWriter):
    def __init__(self, folder: Path, rank: int, rank_state: str, commit: Callable[[dict[str, FileRecord]], None]):
        self._folder, self._rank, self._rank_state, self._commit = folder, rank, rank_state, commit

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        file = rank_file(self._rank)
        tensors: Tensors = {}
        pieces = []
        for item in plan.items:
            name = _piece_name(item.index)
            while name in tensors:  # `w@2` is the piece of w at 2, and may be a tensor's own name
                name += "@"
            tensors[name] = planner.resolve_data(item)  # type: ignore[assignment]
            pieces.append(WriteResult(item.index, tensors[name].nbytes, _Place(file, name)))
        written = write_safetensors(self._folder / file, tensors, {"state": self._rank_state})
        future: Future[list[WriteResult]] = Future()
        # The file's record goes first and by itself: a worker may have no piece to send it with.
        future.set_result([WriteResult(MetadataIndex(file), written.bytes, written), *pieces])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        records: dict[str, FileRecord] = {}
        places: dict[MetadataIndex, _Place] = {}
        for written, *pieces in results:
            records[written.index.fqn] = written.storage_data
            places.update({piece.index: piece.storage_data for piece in pieces})
        (self._folder / INDEX).write_text(json.dumps(_index(metadata, places)))
        self._commit(records)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def write(
    folder: Path,
    snapshot: Snapshot,
    rank: int,
    rank_state: str,
    group: dist.ProcessGroup | None,
    commit: Callable[[dict[str, FileRecord]], None],
) -> None:
    """Writes a snapshot together with the other workers; rank 0 then calls `commit` with the files' records."""
    writer, planner = _Writer(folder, rank, rank_state, commit), _SnapshotPlanner(snapshot)
    if group is None:
        # DCP's own `save` warns when it works for one process; its parts do not.
        plans, metadata = planner.create_global_plan([planner.create_local_plan()])
        writer.finish(metadata, [writer.write_data(plans[0], planner).wait()])
        return
    try:
        save({}, storage_writer=writer, planner=planner, process_group=group)
    except CheckpointException as error:
        causes = [f"rank {failed}: {cause[0]}" for failed, cause in sorted(error.failures.items())]
        first = next(iter(error.failures.values()))[0]
        raise CheckpointError("; ".join(causes)) from first


def rank_file(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


def _piece_name(index: MetadataIndex) -> str:
    offset = index.offset
    return index.fqn if offset is None or not any(offset) else f"{index.fqn}@{','.join(map(str, offset))}"


def _index(metadata: Metadata, places: dict[MetadataIndex, _Place]) -> dict[str, Any]:
    index = {}
    for key, tensor in metadata.state_dict_metadata.items():
        assert isinstance(tensor, TensorStorageMetadata), key
        chunks = []
        for chunk in tensor.chunks:
            place = places[MetadataIndex(key, chunk.offsets)]
            chunks.append(
                {
                    "offsets": list(chunk.offsets),
                    "sizes": list(chunk.sizes),
                    "file": place.file,
                    "name": place.name,
                }
            )
        index[key] = {"dtype": dtype_name(tensor.properties.dtype), "shape": list(tensor.size), "chunks": chunks}
    return index


class Reader:
    """Reads a checkpoint's tensors, whole or in part; every worker for itself."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            self._index: dict[str, Any] = json.loads((folder / INDEX).read_text())
            self._metadata = self._parse()
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{folder.name}/{INDEX} cannot be read: {error!r}") from None

    def shape_and_dtype(self, key: str) -> tuple[torch.Size, torch.dtype]:
        if key not in self._metadata.state_dict_metadata:
            raise CheckpointError(f"{self._folder.name} refers to a tensor '{key}' that it does not hold")
        tensor = self._metadata.state_dict_metadata[key]
        assert isinstance(tensor, TensorStorageMetadata)
        return tensor.size, tensor.properties.dtype

    def load(self, targets: Tensors) -> None:
        """Fills the tensors, in place; a sharded one with this worker's part."""
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(dict(targets), self._metadata, is_coordinator=True)
        self._read(planner.create_local_plan(), planner)

    def rank_state(self, rank: int) -> str | None:
        """The JSON that one worker stored for itself, or None if there was no such worker."""
        path = self._folder / rank_file(rank)
        if not path.exists():
            return None
        with safe_open(path, framework="pt") as file:
            state: str = file.metadata()["state"]
            return state

    def _parse(self) -> Metadata:
        tensors: dict[str, Any] = {}
        places: dict[MetadataIndex, tuple[str, str, torch.Size]] = {}
        for key, entry in self._index.items():
            chunks = []
            for chunk in entry["chunks"]:
                offsets, sizes = torch.Size(chunk["offsets"]), torch.Size(chunk["sizes"])
                if Path(chunk["file"]).name != chunk["file"]:
                    raise CheckpointError(f"{INDEX} names a file outside the checkpoint: {chunk['file']!r}")
                chunks.append(ChunkStorageMetadata(offsets, sizes))
                places[MetadataIndex(key, offsets)] = (chunk["file"], chunk["name"], sizes)
            properties = TensorProperties(dtype=DTYPES[entry["dtype"]])
            tensors[key] = TensorStorageMetadata(properties, torch.Size(entry["shape"]), chunks)
        return Metadata(tensors, storage_data=places)

    def _read(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        by_file: dict[str, list[tuple[ReadItem, str, torch.Size]]] = defaultdict(list)
        for item in plan.items:
            file, name, sizes = self._metadata.storage_data[replace(item.storage_index, index=None)]
            by_file[file].append((item, name, sizes))
        for file, wanted in by_file.items():
            with safe_open(self._folder / file, framework="pt") as opened:
                for item, name, sizes in wanted:
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(_piece(opened, name, sizes, item))
                    planner.commit_tensor(item, target)


def _piece(opened: Any, name: str, sizes: torch.Size, item: ReadItem) -> torch.Tensor:
    view = opened.get_slice(name)
    if torch.Size(view.get_shape()) != sizes:
        raise CheckpointError(f"tensor '{name}' has shape {view.get_shape()}; {list(sizes)} was expected")
    if not sizes:
        whole: torch.Tensor = opened.get_tensor(name)
        return whole
    ranges = tuple(slice(o, o + n) for o, n in zip(item.storage_offsets, item.lengths, strict=True))
    part: torch.Tensor = view[ranges]
    return part
