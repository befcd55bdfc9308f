"""Checks the answers to lesson 02's exercises; no Ray is needed."""

from __future__ import annotations

import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import torch
from torch import nn

from common.checks import Wrong, expect, expect_close


class Wrapped(nn.Module):
    """Stands in for DDP: the model is within."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)


def make(wrapped: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    model = Wrapped(model) if wrapped else model
    return model, torch.optim.Adam(model.parameters(), lr=0.05)


def train_epochs(model: nn.Module, optimizer: torch.optim.Optimizer, epochs: range) -> list[float]:
    losses = []
    for epoch in epochs:
        generator = torch.Generator().manual_seed(epoch)
        x, y = torch.randn(16, 4, generator=generator), torch.randint(2, (16,), generator=generator)
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def check_1(answer: ModuleType) -> None:
    expected = train_epochs(*make(False), range(6))
    for before, after in ((True, True), (False, False), (True, False), (False, True)):
        case = f"saved {_workers(before)}, loaded {_workers(after)}"
        with tempfile.TemporaryDirectory() as folder:
            model, optimizer = make(before)
            train_epochs(model, optimizer, range(3))
            try:
                answer.save(Path(folder), model, optimizer, 2)
                model, optimizer = make(after)
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.zero_()  # all that is right afterwards has been loaded
                following = answer.load(Path(folder), model, optimizer)
            except (AttributeError, KeyError, RuntimeError) as error:
                raise Wrong(f"{case}: {type(error).__name__}: {str(error).splitlines()[0]}") from error
            expect(following == 3, f"{case}: epoch 2 was saved when it was done; load returned {following}, not 3")
            found = train_epochs(model, optimizer, range(3, 6))
            expect_close(found[0], expected[3], f"{case}: the first loss after it, of these weights", 1e-5)
            expect(optimizer.state_dict()["state"] != {}, f"{case}: the optimizer has no state")
            expect_close(
                found[2], expected[5], f"{case}: the third loss after it; does the optimizer know its moments?", 1e-5
            )


def _workers(wrapped: bool) -> str:
    return "by several workers" if wrapped else "by one worker"


class World:
    """Some workers, as threads, that add up numbers together."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=2)
        self.given: dict[int, list[float]] = {}
        self.size = size

    def all_reduce(self, rank: int, numbers: list[float]) -> list[float]:
        self.given[rank] = list(numbers)
        self.barrier.wait()
        sums = [float(sum(column)) for column in zip(*self.given.values(), strict=True)]
        self.barrier.wait()
        return sums


def check_2(answer: ModuleType) -> None:
    seen = [(12.0, 30, 40), (9.0, 2, 10), (1.5, 4, 5)]
    total_loss, total_correct, total = (sum(column) for column in zip(*seen, strict=True))
    world = World(len(seen))

    def worker(rank: int) -> dict[str, float]:
        return answer.metrics(*seen[rank], lambda numbers: world.all_reduce(rank, numbers))

    with ThreadPoolExecutor(len(seen)) as pool:
        futures = [pool.submit(worker, rank) for rank in range(len(seen))]
        try:
            reported = [future.result() for future in futures]
        except threading.BrokenBarrierError:
            raise Wrong("a worker waits in all_reduce for others that do not come: all must call it as often") from None
    for found in reported:
        expect(
            isinstance(found, dict) and found.keys() >= {"loss", "accuracy"},
            f'"loss" and "accuracy" wanted, not {found!r}',
        )
    if any(abs(found["accuracy"] - reported[0]["accuracy"]) > 1e-9 for found in reported):
        raise Wrong("the workers report different accuracies: each knows only of its own images")
    expect_close(
        reported[0]["accuracy"], total_correct / total, "accuracy (a mean of the workers' accuracies is not it)"
    )
    expect_close(reported[0]["loss"], total_loss / total, "loss (over all images, not over workers)")
