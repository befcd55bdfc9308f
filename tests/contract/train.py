"""The contract suite's training script: everything that can break an exact resume, on a model of a few kilobytes."""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import threading
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

import keepstep


class Noisy(Dataset):
    """Samples that are augmented with all three random number generators."""

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(size, 8, generator=generator)
        self.y = torch.randint(0, 3, (size,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int, float]:
        draw = torch.rand(()).item() + random.random() + float(np.random.rand())
        return self.x[index] + 0.1 * draw, self.y[index], index, draw


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(width, width), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(F.gelu(self.linear(x)))


class Seen(nn.Module):
    """State that is no tensor, as quantised layers have."""

    steps = 0

    def get_extra_state(self) -> dict:
        return {"steps": self.steps}

    def set_extra_state(self, state: dict) -> None:
        self.steps = state["steps"]


class Net(nn.Module):
    def __init__(self, dropout: float, norm: bool) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(Block(16, dropout) for _ in range(2))
        self.norm = nn.BatchNorm1d(16) if norm else nn.LayerNorm(16)
        self.head = nn.Linear(16, 3)
        self.seen = Seen()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Count:
    """A tracked object."""

    def __init__(self) -> None:
        self.value, self.history = 0, []

    def state_dict(self) -> dict:
        return {"value": self.value, "history": tuple(self.history)}

    def load_state_dict(self, state: dict) -> None:
        self.value, self.history = state["value"], list(state["history"])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=int, default=58, help="not a multiple of the batch: the last batch is uneven")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--plain", action="store_true", help="no dropout, no BatchNorm: equal at every world size")
    parser.add_argument("--num-workers", type=int, default=0)
    parser.add_argument("--micro", type=int, default=1)
    parser.add_argument("--sleep", type=float, default=0.0, help="seconds a step, for whoever wants to disturb the run")
    parser.add_argument("--kill", nargs="*", default=[], help="PLACE:STEP:RANK, each once; rank -1: all")
    return parser.parse_args()


class Killer:
    """Kills this worker with SIGKILL at given places, each once in the run's life."""

    def __init__(self, run: keepstep.Run, plan: list[str]) -> None:
        self._run = run
        self._dying = threading.Lock()  # one death at a time: a save has a thread of its own
        self._plan = [(place, int(step), int(rank)) for place, step, rank in (entry.split(":") for entry in plan)]
        if any(place == "save" for place, _, _ in self._plan):
            self._die_in_saves()

    def at(self, place: str) -> None:
        for number, (wanted, step, rank) in enumerate(self._plan):
            if wanted == place and self._run.step >= step and rank in (-1, self._run.rank):
                mark = self._run.path / f"killed_{number}_rank{self._run.rank}"
                with self._dying:
                    if not mark.exists():
                        mark.touch()
                        os.kill(os.getpid(), signal.SIGKILL)

    def _die_in_saves(self) -> None:
        from keepstep.checkpoint import dcp

        write = dcp.write_safetensors

        def half_written(path: Path, tensors: dict, metadata: dict) -> object:
            record = write(path, tensors, metadata)
            os.truncate(path, record.bytes // 2)
            self.at("save")
            return write(path, tensors, metadata)

        dcp.write_safetensors = half_written


def main() -> None:
    args = parse()
    run = keepstep.start()
    killer = Killer(run, args.kill)
    model = Net(0.0 if args.plain else 0.1, norm=not args.plain)
    groups = [
        {"params": model.blocks.parameters(), "lr": 5e-3},
        {"params": [*model.stem.parameters(), *model.norm.parameters()]},
        {"params": model.head.parameters(), "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, fused=run.device.type == "cuda")  # whose state is all on the GPU
    train = DataLoader(Noisy(args.size), args.batch_size, shuffle=True, num_workers=args.num_workers)
    test = DataLoader(Noisy(17), 8)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=len(train) * args.epochs + 1)
    model, optimizer, scheduler, train, test = run.prepare(model, optimizer, scheduler, train, test)
    count = run.track("count", Count())

    for epoch in run.epochs(args.epochs):
        tilt = (
            0.0 if args.plain else random.random()
        )  # drawn before the steps: must be the same again after a resume within the epoch
        model.train()
        for batch in run.steps(train):
            x, _, index, draw = batch
            for part in run.micro(batch, args.micro):
                loss = F.cross_entropy(model(part[0] + 0.01 * tilt), part[1])
                run.backward(loss / args.micro)
                run.log(loss=loss, tilt=tilt)
            killer.at("body")
            time.sleep(args.sleep)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            count.value += 1
            model.seen.steps += 1
            note_samples(run, index, draw)
        model.eval()
        correct, seen = torch.zeros(2, device=run.device).unbind()
        with torch.no_grad():
            for x, y, *_ in test:
                correct = correct + (model(x).argmax(1) == y).sum()
                seen = seen + len(x)
                killer.at("validation")
        count.history.append(epoch)
        run.log(
            accuracy=run.sum(correct) / len(test.dataset),
            tested=run.sum(seen),
            count=count.value,
            steps=model.seen.steps,
        )


def note_samples(run: keepstep.Run, index: torch.Tensor, draw: torch.Tensor) -> None:
    """Which samples this step saw, over all workers, and how they were augmented."""
    counted = run._batch.num_samples
    ids, draws = run.gather(index[:counted]), run.gather(draw[:counted])
    if run.is_main:
        with (run.path / "samples.jsonl").open("a") as file:
            file.write(json.dumps({"step": run.step + 1, "ids": ids.tolist(), "draws": draws.tolist()}) + "\n")


if __name__ == "__main__":
    main()
