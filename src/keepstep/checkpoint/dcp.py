"""PyTorch's distributed checkpoint (DCP) with storage of its own: safetensors and JSON in place of its pickles."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
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

from keepstep.checkpoint.files import dtype_name, write_safetensors
from keepstep.checkpoint.index import Piece, bytes_by_file, parse_index
from keepstep.checkpoint.store import FileRecord
from keepstep.checkpoint.tree import Tensors
from keepstep.checkpoint.untrusted import read_error, read_json, shown, size_of
from keepstep.errors import CheckpointError
from keepstep.fragment import Fragment

INDEX = "tensors.json"
_SPREAD = ("model", "optimizer")
"""What tensors' paths begin with that every worker holds the same of, by contract."""


class Snapshot:
    """This worker's part of the state, copied to host memory: training may go on while it is written."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._buffers: dict[MetadataIndex, torch.Tensor] = {}
        self.plan = SavePlan([])

    def take(self, tensors: Tensors) -> None:
        """Copies what this worker is to write; the host memory is kept for the next time."""
        tensors = _own_share(tensors, self._rank, self._world_size)
        self.plan = create_default_local_save_plan(tensors, is_coordinator=self._rank == 0)
        uses_gpu = False
        for item in self.plan.items:
            source = _part(tensors, item.index).detach()
            uses_gpu = uses_gpu or source.is_cuda
            self._buffer(item.index, source).copy_(source, non_blocking=True)
        if uses_gpu:
            torch.cuda.synchronize()

    def allocate(self, tensors: Tensors) -> None:
        """Gets the host memory ahead of the first `take`: page-locked, it takes seconds for a large model."""
        tensors = _own_share(tensors, self._rank, self._world_size)
        for item in create_default_local_save_plan(tensors, is_coordinator=self._rank == 0).items:
            self._buffer(item.index, _part(tensors, item.index))

    def tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self._buffers[index]

    def _buffer(self, index: MetadataIndex, like: torch.Tensor) -> torch.Tensor:
        buffer = self._buffers.get(index)
        if buffer is None or buffer.shape != like.shape or buffer.dtype != like.dtype:
            # A plain contiguous copy: strides are the strategy's affair, not the checkpoint's.
            buffer = torch.empty(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)
            self._buffers[index] = buffer
        return buffer


def _own_share(tensors: Tensors, rank: int, world_size: int) -> Tensors:
    """What one worker writes: its shards, its own state, and an equal part, by size, of weights that all hold whole.

    DCP would let every worker copy all of them before one is chosen to write each. Tracked objects it may: theirs
    are few, and workers need not agree on what there is.
    """
    share: Tensors = {}
    load = [0] * world_size
    held_by_all = [key for key, value in tensors.items() if type(value) is torch.Tensor and key.startswith(_SPREAD)]
    # Largest first, to whom has least so far: the same on every worker, since all know the same sizes.
    for key in sorted(held_by_all, key=lambda key: (-tensors[key].nbytes, key)):
        owner = load.index(min(load))
        load[owner] += tensors[key].nbytes
        if owner == rank:
            share[key] = tensors[key]
    common = set(held_by_all)
    return share | {key: value for key, value in tensors.items() if key not in common}


def _part(tensors: Tensors, index: MetadataIndex) -> torch.Tensor:
    """A tensor, or one of the parts that this worker has of it."""
    whole = tensors[index.fqn]
    found = whole.__get_tensor_shard__(index) if isinstance(whole, Fragment) else find_state_dict_object(tensors, index)
    assert isinstance(found, torch.Tensor)
    return found


class _LoadPlanner(DefaultLoadPlanner):
    """Loads into fragments, too."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        # The inherited one looks for tensors that have no memory yet, and drops what it does not know.
        self.original_state_dict = self.state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return _part(self.state_dict, index)


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
            tensors[name] = planner.resolve_data(item)
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
    """Reads a checkpoint's tensors, whole or in part; every worker for itself. The checkpoint may be anybody's."""

    def __init__(self, folder: Path, sizes: Mapping[str, int] | None = None) -> None:
        """`sizes`: the bytes of the files that the manifest vouches for; without it, of those that are there."""
        self._folder, self._sizes = folder, sizes
        raw = read_json(folder / INDEX, sizes.get(INDEX, -1) if sizes is not None else None)
        try:
            self._tensors = parse_index(raw)
            self._check_backed()
        except CheckpointError as error:
            raise CheckpointError(f"{folder.name}/{INDEX} cannot be read: {error}") from None
        self._metadata = self._for_dcp()

    @property
    def keys(self) -> list[str]:
        return list(self._tensors)

    def shape_and_dtype(self, key: str) -> tuple[torch.Size, torch.dtype]:
        if key not in self._tensors:
            raise CheckpointError(f"{self._folder.name} refers to a tensor {shown(key)} that it does not hold")
        tensor = self._tensors[key]
        return torch.Size(tensor.shape), tensor.dtype

    def load(self, targets: Tensors) -> None:
        """Fills the tensors, in place; a sharded one with this worker's part."""
        for key, target in targets.items():
            shape, _ = self.shape_and_dtype(key)
            if target.shape != shape:
                found, wanted = tuple(shape), tuple(target.shape)
                raise CheckpointError(f"{self._folder.name} has '{key}' with shape {found}; {wanted} was expected")
        planner = _LoadPlanner()
        planner.set_up_planner(dict(targets), self._metadata, is_coordinator=True)
        self._read(planner.create_local_plan(), planner)

    def rank_state(self, rank: int) -> Any:
        """What one worker stored for itself, taken apart; None if there was no such worker."""
        file = rank_file(rank)
        if not self._has(file):
            return None
        with self._open(file) as opened:
            text = (opened.metadata() or {}).get("state")
        try:
            return json.loads(text or "")
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{self._folder.name}/{file} has no state of its worker: {shown(error)}") from None

    def _has(self, file: str) -> bool:
        return file in self._sizes if self._sizes is not None else (self._folder / file).exists()

    def _check_backed(self) -> None:
        """Raises unless the files are there and as large as what they are said to hold: memory is made by the index."""
        for file, held in bytes_by_file(self._tensors).items():
            if self._sizes is not None and file not in self._sizes:
                raise CheckpointError(f"it refers to {file}, which the manifest does not know")
            size = size_of(self._folder / file)
            if held > size:
                raise CheckpointError(f"it says that {file} holds {held} bytes of tensors; the file has {size}")

    def _for_dcp(self) -> Metadata:
        tensors: dict[str, Any] = {}
        places: dict[MetadataIndex, Piece] = {}
        for key, entry in self._tensors.items():
            chunks = [ChunkStorageMetadata(torch.Size(p.offsets), torch.Size(p.sizes)) for p in entry.pieces]
            places.update({MetadataIndex(key, torch.Size(piece.offsets)): piece for piece in entry.pieces})
            tensors[key] = TensorStorageMetadata(TensorProperties(dtype=entry.dtype), torch.Size(entry.shape), chunks)
        return Metadata(tensors, storage_data=places)

    def _read(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        by_file: dict[str, list[tuple[ReadItem, Piece]]] = defaultdict(list)
        for item in plan.items:
            piece: Piece = self._metadata.storage_data[replace(item.storage_index, index=None)]
            by_file[piece.file].append((item, piece))
        for file, wanted in by_file.items():
            with self._open(file) as opened:
                for item, piece in wanted:
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(_values(opened, piece, self._tensors[item.storage_index.fqn].dtype, item))
                    planner.commit_tensor(item, target)

    @contextmanager
    def _open(self, file: str) -> Iterator[Any]:
        path = self._folder / file
        size_of(path)  # raises at what is not a regular file: to open a pipe is to wait
        try:
            with safe_open(path, framework="pt") as opened:
                yield opened
        except OSError as error:
            raise read_error(f"{self._folder.name}/{file}", error) from None
        except SafetensorError as error:
            raise CheckpointError(f"{self._folder.name}/{file} cannot be read: {shown(str(error))}") from None


def _values(opened: Any, piece: Piece, dtype: torch.dtype, item: ReadItem) -> torch.Tensor:
    view = opened.get_slice(piece.name)
    if tuple(view.get_shape()) != piece.sizes:
        found = f"tensor {shown(piece.name)} has shape {view.get_shape()}"
        raise CheckpointError(f"{found}; {list(piece.sizes)} was expected")
    if view.get_dtype() != dtype_name(dtype):
        found = f"tensor {shown(piece.name)} has type {view.get_dtype()}"
        raise CheckpointError(f"{found}; {dtype_name(dtype)} was expected")
    if not piece.sizes:
        whole: torch.Tensor = opened.get_tensor(piece.name)
        return whole
    ranges = tuple(slice(o, o + n) for o, n in zip(item.storage_offsets, item.lengths, strict=True))
    part: torch.Tensor = view[ranges]
    return part
