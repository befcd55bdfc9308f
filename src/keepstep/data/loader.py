"""What `prepare` makes of a DataLoader: the same samples in the same order, whatever the number of workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from keepstep.data.fetcher import Fetcher, Request, pass_key
from keepstep.data.order import Order, Share, Stateful, order_of
from keepstep.data.plan import split
from keepstep.errors import DataError
from keepstep.seeding import preserved_cpu_rng


@dataclass(frozen=True)
class Batch:
    """One worker's part of one global batch, on the device."""

    data: Any
    num_samples: int
    """Samples of it that count: 0 on a worker that stands in with a sample of another, so as to keep step."""
    num_global: int
    world_size: int

    @property
    def weight(self) -> float:
        """What this worker's gradient counts for, where workers' gradients are averaged: 1.0 in an even batch."""
        return self.num_samples * self.world_size / self.num_global


class Source(Protocol):
    """Where batches come from: a map-style data set in some order, or a stream."""

    num_batches: int | None

    def batches(self, pass_number: int, start: int, training: bool) -> Iterator[Batch]: ...

    def state(self) -> dict[str, Any] | None: ...

    def resume(self, state: dict[str, Any]) -> None: ...


class Loader:
    """A prepared DataLoader: `run.steps(loader)` trains on it, plain iteration sees every sample exactly once."""

    def __init__(
        self,
        loader: DataLoader[Any],
        seed: int,
        rank: int,
        world_size: int,
        device: torch.device,
        before_pass: Callable[[], None] = lambda: None,
        even_calls: bool = False,
    ) -> None:
        """`before_pass` runs as an evaluation pass begins; `even_calls` makes every worker see as many batches."""
        self.dataset = loader.dataset
        self.batch_size = loader.batch_size
        self._world_size, self._before_pass = world_size, before_pass
        self._source: Source
        if isinstance(loader.dataset, IterableDataset):
            self._source = StreamSource(loader, rank, world_size, device)
        else:
            self._source = MapSource(loader, seed, rank, world_size, device, even_calls)
        self.passes = 0
        """Training passes begun so far."""
        self.calls = 0
        """Training passes begun in this epoch."""
        self.offset = 0
        """Global batches of the current training pass that are done."""
        self._calls_to_replay = 0

    def __len__(self) -> int:
        if self._source.num_batches is None:
            raise TypeError("this loader's data set has no length")
        return self._source.num_batches

    @property
    def num_batches(self) -> int | None:
        return self._source.num_batches

    def __iter__(self) -> Iterator[Any]:
        self._before_pass()
        for batch in self._source.batches(pass_number=0, start=0, training=False):
            yield batch.data

    def training_pass(self) -> Iterator[Batch]:
        """The next training pass of this epoch, or, after a resume, what is left of the one that was under way."""
        self._check_divides()
        if self._calls_to_replay:
            self._calls_to_replay -= 1
            if self._calls_to_replay:
                return  # this pass was finished before the checkpoint
        else:
            self.passes, self.calls, self.offset = self.passes + 1, self.calls + 1, 0
        yield from self._source.batches(self.passes - 1, self.offset, training=True)

    @property
    def resumes_here(self) -> bool:
        """Whether the next training pass is the one that was under way when the run was saved."""
        return self._calls_to_replay == 1

    def begin_epoch(self) -> None:
        self.calls = self._calls_to_replay = 0

    def state_dict(self) -> dict[str, Any]:
        state = {"passes": self.passes, "calls": self.calls, "offset": self.offset}
        return {**state, "source": self._source.state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.passes, self.calls, self.offset = state["passes"], state["calls"], state["offset"]
        self._calls_to_replay = self.calls
        if state["source"] is not None:
            self._source.resume(state["source"])

    def _check_divides(self) -> None:
        if self.batch_size is not None and self.batch_size % self._world_size:
            lower = self.batch_size - self.batch_size % self._world_size
            raise DataError(
                f"a batch of {self.batch_size} does not divide between {self._world_size} workers; batch_size is that "
                f"of all workers together: use {lower or self._world_size} or {lower + self._world_size}, "
                "or another number of workers"
            )


class _Requests(Sampler[Request]):
    """Tells the DataLoader's workers what to fetch, in the pass that is under way."""

    def __init__(self) -> None:
        self.iterator: Iterator[Request] = iter(())

    def __iter__(self) -> Iterator[Request]:
        return self.iterator


class MapSource:
    """Batches of a map-style data set, fetched by a torch DataLoader with all of the user's options."""

    def __init__(
        self, loader: DataLoader[Any], seed: int, rank: int, world_size: int, device: torch.device, even_calls: bool
    ) -> None:
        self._order, _ = order_of(loader, seed)
        self.num_batches = self._order.num_batches
        self._seed, self._rank, self._world_size, self._device = seed, rank, world_size, device
        self._even_calls = even_calls
        self._requests = _Requests()
        self._loader = _rebuilt(loader, self._requests)
        self._state: dict[str, Any] | None = None

    def batches(self, pass_number: int, start: int, training: bool) -> Iterator[Batch]:
        pending: list[Share] = []
        key = pass_key(self._seed, pass_number)
        self._requests.iterator = self._ask(self._order, pass_number, start, training, key, pending)
        with preserved_cpu_rng():  # making the iterator draws a seed for the DataLoader's workers
            fetched = iter(self._loader)
        for data in fetched:
            share = pending.pop(0)
            self._state = share.state
            num_samples = len(share.indices)
            if not num_samples and not training:
                data = take(data, 0, 0)
            yield Batch(move(data, self._device), num_samples, share.num_global, self._world_size)

    def _ask(
        self, order: Order, pass_number: int, start: int, training: bool, key: int, pending: list[Share]
    ) -> Iterator[Request]:
        for share in order.shares(pass_number, start, self._rank, self._world_size):
            # An empty share: the last batch has fewer samples than there are workers. In training, and where the
            # model's forward is collective, it must take part all the same, on a sample that counts for nothing.
            if share.stand_in is None:
                wanted = share.indices
            elif training or self._even_calls:
                wanted = share.stand_in
            else:
                continue
            pending.append(share)
            yield Request(wanted, key)

    def state(self) -> dict[str, Any] | None:
        return self._state

    def resume(self, state: dict[str, Any]) -> None:
        self._order.resume(state)
        self._state = state


class StreamSource:
    """Batches of a stateful iterable data set: every worker reads the stream and keeps its part of each batch."""

    num_batches: int | None = None

    def __init__(self, loader: DataLoader[Any], rank: int, world_size: int, device: torch.device) -> None:
        self._loader, self._rank, self._world_size, self._device = loader, rank, world_size, device
        if isinstance(loader, Stateful):  # torchdata's StatefulDataLoader
            self._stateful: Stateful = loader
        elif isinstance(loader.dataset, Stateful) and loader.num_workers == 0:
            self._stateful = loader.dataset
        else:
            raise DataError(
                f"the place in the iterable data set {type(loader.dataset).__name__} cannot be saved; give it "
                "state_dict() and load_state_dict() and num_workers=0, or use torchdata's StatefulDataLoader"
            )
        if isinstance(loader.dataset, Sized) and loader.batch_size:
            self.num_batches = -(-len(loader.dataset) // loader.batch_size)

    def batches(self, pass_number: int, start: int, training: bool) -> Iterator[Batch]:
        with preserved_cpu_rng():
            stream = iter(self._loader)
        for data in stream:
            num_global = size_of(data)
            begin, end = split(0, num_global, self._rank, self._world_size)
            num_samples = end - begin
            if not num_samples and training:
                begin, end = 0, 1  # keeps step with the others on a sample that counts for nothing
            part = move(take(data, begin, end), self._device)
            yield Batch(part, num_samples, num_global, self._world_size)

    def state(self) -> dict[str, Any] | None:
        return self._stateful.state_dict()

    def resume(self, state: dict[str, Any]) -> None:
        self._stateful.load_state_dict(state)


def _rebuilt(loader: DataLoader[Any], requests: _Requests) -> DataLoader[Any]:
    return DataLoader(
        Fetcher(loader.dataset, loader.collate_fn),
        batch_size=None,  # a request already is a batch
        sampler=requests,
        collate_fn=_as_it_is,
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory and torch.cuda.is_available(),
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=torch.Generator(),  # so that the run's own generator does not move with each iterator
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )


def _as_it_is(batch: Any) -> Any:
    return batch


def move(value: Any, device: torch.device) -> Any:
    """Moves every tensor in nested lists, tuples and dicts, and whatever has a `.to`, to the device."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    return _rebuild(value, lambda part: move(part, device)) if _is_container(value) else _to(value, device)


def _to(value: Any, device: torch.device) -> Any:
    return value.to(device) if hasattr(value, "to") and callable(value.to) else value


def take(value: Any, begin: int, end: int) -> Any:
    """Samples [begin, end) of a collated batch."""
    if isinstance(value, (torch.Tensor, str, bytes)) or not _is_container(value):
        return value[begin:end] if isinstance(value, torch.Tensor) and value.dim() else value
    if isinstance(value, list) and value and not isinstance(value[0], (torch.Tensor, list, tuple, Mapping)):
        return value[begin:end]  # default_collate leaves strings as a list of samples
    return _rebuild(value, lambda part: take(part, begin, end))


def size_of(batch: Any) -> int:
    """Number of samples in a collated batch: the first dimension of its first tensor."""
    if isinstance(batch, torch.Tensor) and batch.dim():
        return int(batch.shape[0])
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else ()
    for part in parts:
        size = size_of(part)
        if size:
            return size
    return 0


def _is_container(value: Any) -> bool:
    return isinstance(value, (list, tuple, Mapping))


def _rebuild(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, Mapping):
        changed = {key: change(part) for key, part in value.items()}
        return changed if type(value) is dict else type(value)(changed)  # type: ignore[call-arg]
    parts = [change(part) for part in value]
    if hasattr(value, "_fields"):  # a namedtuple takes its fields one by one
        return type(value)(*parts)
    return type(value)(parts)
