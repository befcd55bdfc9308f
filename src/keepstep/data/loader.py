"""What `prepare` makes of a DataLoader: the same samples in the same order, whatever the number of workers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sized
from contextlib import AbstractContextManager, nullcontext
from copy import copy, deepcopy
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from keepstep.data.fetcher import Fetcher, Request, pass_key
from keepstep.data.nested import differing, sizes_in, take
from keepstep.data.order import Order, Share, Stateful, order_of
from keepstep.data.plan import split
from keepstep.data.transfer import Transfer
from keepstep.errors import DataError
from keepstep.observe.heart import VALIDATION, Heart
from keepstep.seeding import preserved_cpu_rng


class Batch(NamedTuple):
    """One worker's part of one global batch, on the device."""

    data: Any
    num_samples: int
    """Samples of it that count: 0 on a worker that stands in with a sample of another, so as to keep step."""
    num_global: int
    world_size: int
    indices: Any = None
    """The samples' numbers in the data set, where it has any."""

    @property
    def weight(self) -> float:
        """What this worker's gradient counts for, where workers' gradients are averaged: 1.0 in an even batch."""
        return self.num_samples * self.world_size / self.num_global


class Source(Protocol):
    """Where batches come from: a map-style data set in some order, or a stream."""

    num_batches: int | None
    ended: bool
    """Whether the newest training pass is over: its last batch was handed out, and nothing is left of it."""

    def batches(self, pass_number: int, start: int, training: bool) -> Iterator[Batch]: ...

    def state(self) -> dict[str, Any] | None: ...

    def resume(self, state: dict[str, Any] | None, ended: bool) -> None: ...

    def close(self) -> None: ...


class HasSource(Protocol):
    """What can be prepared besides a DataLoader."""

    @property
    def dataset(self) -> Any: ...

    @property
    def batch_size(self) -> int: ...

    def source(self, seed: int, rank: int, world_size: int, device: torch.device, even_calls: bool) -> Source: ...


class Loader:
    """A prepared DataLoader: `run.steps(loader)` trains on it, plain iteration sees every sample exactly once."""

    def __init__(
        self,
        loader: DataLoader[Any] | HasSource,
        seed: int,
        rank: int,
        world_size: int,
        device: torch.device,
        heart: Heart | None = None,
        evaluating: Callable[[], AbstractContextManager[None]] = nullcontext,
        even_calls: bool = False,
        uneven_shares: bool = False,
    ) -> None:
        """`evaluating` stands around an evaluation pass; `even_calls` makes every worker see as many batches;
        `uneven_shares`: a training batch need not divide evenly between the workers, whose number may change."""
        self.dataset = loader.dataset
        self.batch_size = loader.batch_size
        self._world_size, self._uneven_shares = world_size, uneven_shares
        self._heart, self._evaluating = heart or Heart(None), evaluating
        transfer = Transfer(device, self._heart)
        self._source: Source
        if not isinstance(loader, DataLoader):
            self._source = loader.source(seed, rank, world_size, device, even_calls)
        elif isinstance(loader.dataset, IterableDataset):
            self._source = StreamSource(loader, rank, world_size, transfer, even_calls)
        else:
            self._source = MapSource(loader, seed, rank, world_size, transfer, even_calls)
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
        with self._evaluating():
            for batch in self._source.batches(pass_number=0, start=0, training=False):
                self._heart.enter(VALIDATION)  # a sign of life, too
                yield batch.data

    def training_pass(self) -> Iterator[Batch]:
        """The next training pass of this epoch, or, after a resume, what is left of the one that was under way."""
        self._check_divides()
        is_new = not self._calls_to_replay
        if is_new:
            self.passes, self.calls, self.offset = self.passes + 1, self.calls + 1, 0
        else:
            self._calls_to_replay -= 1
            if self._calls_to_replay or self._source.ended:
                return  # this pass was finished before the checkpoint
        is_empty = True
        for batch in self._source.batches(self.passes - 1, self.offset, training=True):
            is_empty = False
            yield batch
        if is_new and is_empty:
            # A sampler or a stream that was left, or saved, right behind its last sample: now it begins again.
            yield from self._source.batches(self.passes - 1, self.offset, training=True)

    @property
    def resumes_here(self) -> bool:
        """Whether the next training pass is the one that was under way when the run was saved."""
        return self._calls_to_replay == 1

    def begin_epoch(self) -> None:
        self.calls = self._calls_to_replay = 0

    def state_dict(self) -> dict[str, Any]:
        state = {"passes": self.passes, "calls": self.calls, "offset": self.offset, "ended": self._source.ended}
        return {**state, "source": self._source.state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.passes, self.calls, self.offset = state["passes"], state["calls"], state["offset"]
        self._calls_to_replay = self.calls
        self._source.resume(state["source"], state["ended"])

    def close(self) -> None:
        """The run is over: nothing more will be asked for."""
        self._source.close()

    def _check_divides(self) -> None:
        if self.batch_size is not None and self.batch_size % self._world_size and not self._uneven_shares:
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
        self, loader: DataLoader[Any], seed: int, rank: int, world_size: int, transfer: Transfer, even_calls: bool
    ) -> None:
        self._order = order_of(loader, seed)
        self.num_batches = self._order.num_batches
        self._seed, self._rank, self._world_size, self._transfer = seed, rank, world_size, transfer
        self._even_calls = even_calls
        self._requests = _Requests()
        self._loader = _rebuilt(loader, self._requests)
        self._state: dict[str, Any] | None = None
        self.ended = False

    def batches(self, pass_number: int, start: int, training: bool) -> Iterator[Batch]:
        if training and not self.ended and self._state is not None:
            # The pass before was left early, and workers may have fetched ahead: go on behind what was handed out.
            self._order.resume(self._state)
        pending: list[Share] = []
        key = pass_key(self._seed, pass_number)
        self._requests.iterator = self._ask(self._order, pass_number, start, training, key, pending)
        for data in self._fetched():
            share = pending.pop(0)
            if training:
                self._state, self.ended = share.state, share.ended
            num_samples = len(share.indices)
            if not num_samples and not training:
                data = take(data, 0, 0)
            batch = Batch(self._transfer(data), num_samples, share.num_global, self._world_size, share.indices)
            del data  # memory that is held while the step goes on cannot be the next batch's, which is slower in fresh
            yield batch
        if training:
            self.ended = True

    def _fetched(self) -> Iterator[Any]:
        if not self._loader.num_workers and not self._loader.pin_memory:
            return map(self._loader.dataset.__getitem__, self._requests)  # all that a DataLoader would do
        with preserved_cpu_rng():  # making the iterator draws a seed for the DataLoader's workers
            return iter(self._loader)

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

    def resume(self, state: dict[str, Any] | None, ended: bool) -> None:
        self._state, self.ended = state, ended
        if state is not None:
            self._order.resume(state)

    def close(self) -> None:
        pass  # the DataLoader's workers end with it


class _Part(NamedTuple):
    """One worker's part of a stream's global batch, collated."""

    num_global: int
    data: Any


class _CollatePart:
    """A stream's `collate_fn`: samples are divided before they are collated, since only then each is one for sure."""

    def __init__(self, collate: Callable[[Any], Any], rank: int, world_size: int) -> None:
        self._collate, self._rank, self._world_size = collate, rank, world_size

    def __call__(self, samples: list[Any]) -> _Part:
        begin, end = split(0, len(samples), self._rank, self._world_size)
        return _Part(len(samples), self._collate(samples[begin:end] or samples[:1]))


class StreamSource:
    """Batches of a stateful iterable data set: every worker reads the stream and keeps its part of each batch."""

    def __init__(
        self, loader: DataLoader[Any], rank: int, world_size: int, transfer: Transfer, even_calls: bool
    ) -> None:
        self._rank, self._world_size, self._transfer, self._even_calls = rank, world_size, transfer, even_calls
        self._loader = copy(loader)  # which leaves the user's own as it is
        if loader.num_workers:
            self._loader.worker_init_fn = _OwnGroup(loader.worker_init_fn)
        if loader.batch_size is not None:
            self._loader.collate_fn = _CollatePart(loader.collate_fn, rank, world_size)
        # A short batch has brought the data set to its end, from where it begins again: a StatefulDataLoader knows.
        self._short_is_last = not isinstance(loader, Stateful)
        if isinstance(self._loader, Stateful):  # torchdata's StatefulDataLoader
            self._stateful: Stateful = self._loader
        elif isinstance(loader.dataset, Stateful) and loader.num_workers == 0:
            self._stateful = loader.dataset
        else:
            raise DataError(
                f"the place in the iterable data set {type(loader.dataset).__name__} cannot be saved; give it "
                "state_dict() and load_state_dict() and num_workers=0, or use torchdata's StatefulDataLoader"
            )
        self.num_batches = _stream_length(loader)
        self.ended = False
        self._under_way = False

    def batches(self, pass_number: int, start: int, training: bool) -> Iterator[Batch]:
        if training and self._under_way:
            # The pass before was left early: go on there, as after a resume, whatever workers have read ahead.
            self.resume(deepcopy(self.state()), ended=False)
        self._under_way |= training
        with preserved_cpu_rng():
            stream = iter(self._loader)
        for data in stream:
            part, num_samples, num_global = self._part(data)
            if training:
                self.ended = self._short_is_last and num_global < (self._loader.batch_size or 0)
            elif not num_samples:
                if not self._even_calls:
                    continue
                part = take(part, 0, 0)
            yield Batch(self._transfer(part), num_samples, num_global, self._world_size)
        if training:
            self.ended, self._under_way = True, False

    def _part(self, data: Any) -> tuple[Any, int, int]:
        """This worker's part of a batch, its samples that count, and those of the whole batch.

        Without samples that count the part is a sample of another worker's, to keep step on.
        """
        if isinstance(data, _Part):
            begin, end = split(0, data.num_global, self._rank, self._world_size)
            return data.data, end - begin, data.num_global
        sizes = sizes_in(data)
        if self._world_size == 1:  # nothing to divide, so what cannot be told does not matter: it counts as one
            num_samples = max(1, *sizes) if len(sizes) == 1 else 1
            return data, num_samples, num_samples
        if len(sizes) != 1:
            raise DataError(
                f"a batch that {type(self._loader.dataset).__name__} made itself cannot be divided between "
                f"{self._world_size} workers: {differing(sizes)}; let the data set give single samples and the "
                "DataLoader batch_size=N (the global batch)"
            )
        num_global = sizes.pop()
        begin, end = split(0, num_global, self._rank, self._world_size)
        part = take(data, begin, end) if end > begin else take(data, 0, 1)
        return part, end - begin, num_global

    def state(self) -> dict[str, Any] | None:
        with preserved_cpu_rng():  # a StatefulDataLoader makes an iterator to ask, which draws a seed
            return self._stateful.state_dict()

    def resume(self, state: dict[str, Any] | None, ended: bool) -> None:
        if state is None:
            found = type(self._loader.dataset).__name__
            raise DataError(
                f"the checkpoint has no place in the stream {found}: it is of other data; use another --name"
            )
        self._stateful.load_state_dict(state)
        self.ended, self._under_way = ended, False

    def close(self) -> None:
        pass


def _stream_length(loader: DataLoader[Any]) -> int | None:
    if not isinstance(loader.dataset, Sized) or not loader.batch_size:
        return None
    whole, rest = divmod(len(loader.dataset), loader.batch_size)
    return whole + (1 if rest and not loader.drop_last else 0)


def _rebuilt(loader: DataLoader[Any], requests: _Requests) -> DataLoader[Any]:
    return DataLoader(
        Fetcher(loader.dataset, loader.collate_fn),
        batch_size=None,  # a request already is a batch
        sampler=requests,
        collate_fn=_as_it_is,
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory and torch.cuda.is_available(),
        timeout=loader.timeout,
        worker_init_fn=_OwnGroup(loader.worker_init_fn) if loader.num_workers else None,
        multiprocessing_context=loader.multiprocessing_context,
        generator=torch.Generator(),  # so that the run's own generator does not move with each iterator
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )


class _OwnGroup:
    """A `worker_init_fn` that takes the process out of reach of signals to the training process's group.

    Ctrl-C and `timeout` signal the whole group. That is a request to save and stop; but a loader process dies of it,
    and the step that is to be finished and saved would fail for want of it.
    """

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self._then = then

    def __call__(self, number: int) -> None:
        os.setpgid(0, 0)
        if self._then is not None:
            self._then(number)


def _as_it_is(batch: Any) -> Any:
    return batch
