"""A small training with one fault of choice in it, for benchmarks/verdicts.py and the tests."""

from __future__ import annotations

import argparse
import mmap
import random
import threading
import time

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import keepstep

FAULTS = (
    "none",
    "loader",
    "rank",
    "rank-loader",
    "skip",
    "deadlock",
    "spin",
    "leak",
    "nan-data",
    "nan-layer",
    "nan-rate",
)
_HELD = threading.Lock()
_HELD.acquire()


class Samples(Dataset[tuple[torch.Tensor, int]]):
    def __init__(self, count: int, sleep_s: float) -> None:
        self._count, self._sleep_s = count, sleep_s

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self._sleep_s:
            time.sleep(self._sleep_s)
        generator = torch.Generator().manual_seed(index)
        return torch.randn(64, generator=generator), index % 10


class Root(nn.Module):
    """A square root, which has no answer for everything."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = 100.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.shift).sqrt()


class Statistics(nn.Module):
    """Buffers that change at each step, as batch norms have them; the training is the same with them and without."""

    def __init__(self, width: int, num_norms: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm1d(width, affine=False) for _ in range(num_norms))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm in self.norms:
            norm(x.detach())
        return x


def build(width: int, num_norms: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), Root(), nn.Linear(width, width), nn.ReLU(),
        Statistics(width, num_norms), nn.Linear(width, 10),
    )  # fmt: skip


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fault", choices=FAULTS, default="none")
    parser.add_argument("--rank", type=int, default=0, help="which worker has it, where not all have")
    parser.add_argument("--at", type=int, default=50, help="the step from which on, or in which, it is there")
    parser.add_argument("--strength", type=float, default=1.0, help="relative to a step, or MB a step for a leak")
    parser.add_argument("--once", action="store_true", help="not again after a restart")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--step-ms", type=float, default=15.0, help="what a step takes, by sleeping")
    parser.add_argument("--jitter", type=float, default=0.1)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--norms", type=int, default=0, help="layers with buffers, which workers send each other, too")
    return parser.parse_args()


def fresh_memory(size: int, device: torch.device) -> torch.Tensor:
    """Filled, and not from what was freed before."""
    if device.type == "cuda":
        return torch.ones(size // 4, device=device)
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return torch.frombuffer(mmap.mmap(-1, size, flags=private), dtype=torch.uint8).fill_(1)


def main() -> None:
    flags = parse()
    run = keepstep.start()
    mine = run.rank == flags.rank
    step_s, batch = flags.step_ms / 1e3, 8
    slow_loader = flags.fault == "loader" or (flags.fault == "rank-loader" and mine)
    # A worker loads its part of the batch only.
    sleep_s = flags.strength * step_s / (batch / run.world_size) if slow_loader else 0.0
    samples = Samples(batch * flags.steps // flags.epochs, sleep_s)
    model = build(flags.width, flags.norms)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e12 if flags.fault == "nan-rate" else 0.05)
    train, test = DataLoader(samples, batch_size=batch), DataLoader(Samples(64, 0.0), batch_size=16)
    model, optimizer, train, test = run.prepare(model, optimizer, train, test)
    kept, jitter, restarted = [], random.Random(run.rank), (run.path / "events.jsonl").read_text().count("launched") > 1
    for _ in run.epochs(flags.epochs):
        for x, y in run.steps(train):
            time.sleep(step_s * (1 + flags.jitter * jitter.random()))
            now = run.step + 1 == flags.at and not (flags.once and restarted)
            if flags.fault == "rank" and mine and run.step + 1 >= flags.at:
                time.sleep(flags.strength * step_s)
            if flags.fault == "deadlock" and mine and now:
                _HELD.acquire()
            while flags.fault == "spin" and mine and now:
                pass
            if flags.fault == "skip" and not (mine and now):
                run.mean(torch.ones(()))
            if flags.fault == "leak":  # all make it, since fresh memory takes time, too; one keeps it
                kept += [fresh_memory(int(flags.strength * 1e6), run.device)]
                kept = kept if mine else []
            if flags.fault == "nan-data" and now:
                x = x * float("nan")
            model[3].shift = -1e3 if flags.fault == "nan-layer" and now else 100.0
            loss = functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss=loss)
        correct = sum((model(x).argmax(1) == y).sum() for x, y in test)
        run.log(accuracy=run.sum(correct) / 64)


if __name__ == "__main__":
    main()
