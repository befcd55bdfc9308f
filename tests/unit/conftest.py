"""Fakes that several unit tests share: ranks as threads, loaders of any rank, and random numbers left as they were."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from torch.utils.data import DataLoader

from keepstep.collective import Collective
from keepstep.data.loader import Loader
from keepstep.seeding import preserved_cpu_rng

# The same examples every time, and no time limit on one: a shared machine is now and then slow.
settings.register_profile(
    "unit",
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=60,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.load_profile("unit")

RunRanks = Callable[[int, Callable[[Collective, int], Any]], list[Any]]
MakeLoader = Callable[..., Loader]


@pytest.fixture(autouse=True)
def _own_random_numbers() -> Iterator[None]:
    """A test that seeds generators leaves them, for the next one, as it found them."""
    with preserved_cpu_rng():
        yield


class _Exchange:
    """What threads that play ranks say to each other."""

    def __init__(self, world_size: int) -> None:
        self.barrier = threading.Barrier(world_size, timeout=10)
        self.values: list[Any] = [None] * world_size


class ThreadCollective(Collective):
    """A Collective whose ranks are threads of this process."""

    def __init__(self, exchange: _Exchange, rank: int) -> None:
        super().__init__(len(exchange.values), torch.device("cpu"))
        self._exchange, self._rank = exchange, rank
        self.calls: list[str] = []

    def rows(self, row: list[float]) -> list[list[float]]:
        return self._all("rows", row)

    def objects(self, value: Any) -> list[Any]:
        return self._all("objects", value)

    def from_rank0(self, value: Any) -> Any:
        return self._all("from_rank0", value)[0]

    def _all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [part.clone() for part in self._all("all_gather", tensor)]

    def _all(self, call: str, value: Any) -> list[Any]:
        self.calls.append(call)
        self._exchange.values[self._rank] = value
        self._exchange.barrier.wait()
        values = list(self._exchange.values)
        self._exchange.barrier.wait()
        return values


@pytest.fixture
def run_ranks() -> RunRanks:
    """`run_ranks(2, work)` calls `work(collective, rank)` on two ranks at once; returns what each returned."""

    def run(world_size: int, work: Callable[[Collective, int], Any]) -> list[Any]:
        exchange = _Exchange(world_size)
        results: list[Any] = [None] * world_size
        errors: list[BaseException] = []

        def play(rank: int) -> None:
            try:
                results[rank] = work(ThreadCollective(exchange, rank), rank)
            except BaseException as error:
                errors.append(error)
                exchange.barrier.abort()

        threads = [threading.Thread(target=play, args=(rank,)) for rank in range(world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise next((error for error in errors if not isinstance(error, threading.BrokenBarrierError)), errors[0])
        return results

    return run


@pytest.fixture
def make_loader() -> MakeLoader:
    """`make_loader(data_loader, rank, world_size)` is what `run.prepare` makes of a DataLoader on that rank."""

    def make(loader: DataLoader[Any], rank: int = 0, world_size: int = 1, seed: int = 0, **options: Any) -> Loader:
        return Loader(loader, seed, rank, world_size, torch.device("cpu"), **options)

    return make
