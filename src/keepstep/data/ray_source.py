"""A worker's batches of a Ray data set: asks the feeder for windows, and takes its own rows of each global batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from keepstep.collective import Collective
from keepstep.data.fetcher import pass_key
from keepstep.data.loader import Batch
from keepstep.data.nested import move, take
from keepstep.data.plan import Indices, split
from keepstep.data.prefetch import prefetched
from keepstep.data.ray_cluster import NAMESPACE, connect, disconnect, import_ray
from keepstep.data.ray_data import RayData
from keepstep.data.ray_feeder import Begin, Feeder
from keepstep.data.ray_rows import Buffers, Rows, check_alike
from keepstep.data.ray_windows import Place, Window
from keepstep.errors import DataError, KeepstepError
from keepstep.seeding import mix, preserved_cpu_rng, seed_sample

_BATCHES_AHEAD = 4
_WINDOWS_AHEAD = 1


class _Share(NamedTuple):
    """This worker's rows of one global batch."""

    data: Any
    num_samples: int
    num_global: int
    number: int
    """Of the batch in its pass."""
    window: dict[str, Any]
    """The place of the window that the batch is in: what a checkpoint needs, beside the number."""
    moved: torch.cuda.Event | None = None
    """When the rows are on the device, where they are on their way there already."""


@dataclass(frozen=True)
class Joined:
    """A `RayData` that all workers of an attempt have."""

    loader: RayData
    collective: Collective
    name: str
    """Of this loader in this attempt: the same on all workers, never used before."""

    @property
    def dataset(self) -> Any:
        return self.loader.dataset

    @property
    def batch_size(self) -> int:
        return self.loader.batch_size

    def source(self, seed: int, rank: int, world_size: int, device: torch.device, even_calls: bool) -> RaySource:
        """Starts the feeder. Collective."""
        connect(rank, self.collective)
        feeder = _start_feeder(self, seed, world_size) if rank == 0 else None
        self.collective.barrier()
        if feeder is None:
            feeder = import_ray().get_actor(self.name, NAMESPACE)
        return RaySource(self.loader, seed, rank, world_size, device, even_calls, feeder)


class RaySource:
    """Batches of a Ray data set, on this worker."""

    num_batches: int | None = None

    def __init__(
        self,
        loader: RayData,
        seed: int,
        rank: int,
        world_size: int,
        device: torch.device,
        even_calls: bool,
        feeder: Any,
    ) -> None:
        self._loader, self._cut, self._seed = loader, loader.cut(seed), seed
        self._rank, self._world_size, self._device, self._even_calls = rank, world_size, device, even_calls
        self._side_stream: Any = None
        """What copies batches to the GPU while it trains; a collate_fn's are not known before its turn."""
        if device.type == "cuda" and loader.collate_fn is None:
            self._side_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._buffers = Buffers(pin=device.type == "cuda")
        self._feeder = feeder
        self._passes_begun = 0
        self._window: dict[str, Any] | None = None
        self.ended = False

    def batches(self, pass_number: int, start: int, training: bool) -> Iterator[Batch]:
        self._passes_begun += 1
        saved = self._checked(self._window) if training and start else None
        place = Place(saved["segment"], saved["skip"]) if saved is not None else Place(0, 0)
        begin = Begin(self._passes_begun, pass_number, place)
        if training:
            self.ended = False
        try:
            for share in prefetched(self._shares(begin, start, saved, training), _BATCHES_AHEAD):
                if training:
                    self._window = share.window
                yield self._batch(share, pass_number, training)
                del share
        finally:
            self._leave(begin)
        if training:
            self.ended = True

    def state(self) -> dict[str, Any] | None:
        return self._window

    def resume(self, state: dict[str, Any] | None, ended: bool) -> None:
        self._window, self.ended = state, ended

    def close(self) -> None:
        """Stops what was started here."""
        if self._rank == 0 and self._feeder is not None and import_ray().is_initialized():
            with suppress(Exception):  # the cluster may be gone, which may be why the run ends
                import_ray().kill(self._feeder)
        self._feeder = None
        disconnect()

    def _leave(self, begin: Begin) -> None:
        # A loop that was left may be cleared away long after the run; a call would then connect to Ray anew.
        if self._feeder is not None and import_ray().is_initialized():
            self._feeder.leave.remote(begin, self._rank)

    # -- in the prefetching threads, where no random number may be drawn ----------------------------------------------

    def _shares(self, begin: Begin, start: int, saved: dict[str, Any] | None, training: bool) -> Iterator[_Share]:
        first = saved["first"] if saved is not None else 0
        num_units = _get(self._feeder.num_units.remote())
        count, kinds = 0, None
        for window, blocks in prefetched(self._windows(begin), _WINDOWS_AHEAD):
            rows = Rows(window.pieces, blocks, self._buffers)
            del blocks
            kinds = kinds or rows.kinds
            check_alike(kinds, rows.kinds)
            place = {**window.place._asdict(), "first": first, "mark": rows.mark(), "units": num_units, **self._shape()}
            if saved is not None and not count:
                _check_same(saved, place)
            order = self._cut.row_order(window, begin.pass_number)
            batches = self._cut.num_batches(window, self._loader.drop_last)
            for number in range(max(first, start), first + batches):
                share = self._share(rows, order, number, place, training)
                if share is not None:
                    yield self._on_its_way(share)
            first, count = first + batches, count + 1
        if first == 0 or first < start:
            self._raise_too_short(count, start)

    def _windows(self, begin: Begin) -> Iterator[tuple[Window, list[Any]]]:
        number = 0
        while (window := _get(self._feeder.window.remote(begin, number, self._rank))) is not None:
            yield window, _get([piece.block for piece in window.pieces])
            number += 1

    def _share(self, rows: Rows, order: Indices, number: int, place: dict[str, Any], training: bool) -> _Share | None:
        begin = (number - place["first"]) * self._cut.batch_size
        end = min(begin + self._cut.batch_size, len(order))
        mine = order[slice(*split(begin, end, self._rank, self._world_size))]
        if len(mine):
            return _Share(rows.take(mine), len(mine), end - begin, number, place)
        # Fewer rows than workers: in training, and where the model's forward is collective, this one takes part on a
        # row that counts for nothing.
        if not training and not self._even_calls:
            return None
        return _Share(rows.take(order[begin : begin + 1]), 0, end - begin, number, place)

    def _on_its_way(self, share: _Share) -> _Share:
        if self._side_stream is None:
            return share
        with torch.cuda.stream(self._side_stream):
            data = move(share.data, self._device)
            return share._replace(data=data, moved=self._side_stream.record_event())

    # -- in the user's thread -----------------------------------------------------------------------------------------

    def _batch(self, share: _Share, pass_number: int, training: bool) -> Batch:
        data = share.data
        if share.moved is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(share.moved)
            for column in data.values():
                if isinstance(column, torch.Tensor):
                    column.record_stream(stream)
        if self._loader.collate_fn is not None:
            arrays = {name: part.numpy() if isinstance(part, torch.Tensor) else part for name, part in data.items()}
            # Here and not in a thread: it may draw random numbers, which are the training loop's to draw.
            with preserved_cpu_rng():
                seed_sample(mix(pass_key(self._seed, pass_number), share.number, self._rank))
                data = move(self._loader.collate_fn(arrays), self._device)
        if not share.num_samples and not training:
            data = take(data, 0, 0)
        return Batch(data, share.num_samples, share.num_global, self._world_size)

    def _shape(self) -> dict[str, int]:
        return {"batch_size": self._cut.batch_size, "window_rows": self._cut.window_rows}

    def _checked(self, saved: dict[str, Any] | None) -> dict[str, Any]:
        if saved is None or "mark" not in saved:
            raise DataError("the checkpoint has no place in a Ray data set: it is of other data; use another --name")
        for name, here in self._shape().items():
            if saved[name] != here:
                raise DataError(
                    f"{name} was {saved[name]} when the run was saved within an epoch, and is {here} here; rows would "
                    "be seen twice or not at all: set it back, or use another --name"
                )
        return saved

    def _raise_too_short(self, num_windows: int, start: int) -> None:
        if start:
            raise DataError(
                f"the data set ended before batch {start}, which the run had seen when it was saved: it has become "
                "shorter; give it the same data, or use another --name"
            )
        if num_windows:
            raise DataError(
                f"the data set's rows make no batch of {self._cut.batch_size}; use a smaller batch_size, or "
                "drop_last=False"
            )
        raise DataError("the Ray data set has no rows; look at its files, and at what its filters leave")


def _start_feeder(joined: Joined, seed: int, world_size: int) -> Any:
    actor = import_ray().remote(Feeder)
    options = actor.options(
        name=joined.name,
        namespace=NAMESPACE,
        num_cpus=0,
        max_concurrency=2 * world_size + 2,  # each worker may wait for a window, and leave another pass
    )
    feeder = options.remote(joined.loader.made(), joined.loader.cut(seed), world_size)
    _get(feeder.num_units.remote())  # what is wrong with the data set, or with the cluster, is said here and once
    return feeder


def _get(reference: Any) -> Any:
    """`ray.get`, with an error of ours as it was raised."""
    ray = import_ray()
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, KeepstepError):
            raise error.cause from None
        raise


def _check_same(saved: dict[str, Any], found: dict[str, Any]) -> None:
    if saved["units"] != found["units"]:
        raise DataError(
            f"the data set had {saved['units']} input blocks when the run was saved and has {found['units']} now; give "
            "it the same files and the same override_num_blocks, or use another --name"
        )
    if saved["mark"] != found["mark"]:
        raise DataError(
            "the data set gives other rows than when the run was saved, so it cannot go on within this epoch; its "
            "files must be the same, and its transforms must not draw random numbers without a seed (docs/ray_data.md)"
        )
