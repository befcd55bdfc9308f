"""A small training that somebody kills: as a script by hand for a bare torchrun, and with keepstep."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

WORKERS, EVERY, STEP_S = 2, 5, 0.02
"""EVERY: steps between checkpoints. STEP_S: a step takes at least so long, as a larger model's would."""


def make(steps: int) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    data = TensorDataset(torch.randn(64 * steps, 32), torch.randint(0, 8, (64 * steps,)))
    return model, torch.optim.AdamW(model.parameters()), DataLoader(data, 64)


def note(folder: str | Path, step: int, rank: int) -> None:
    """A completed step, with its time and the process that made it."""
    with (Path(folder) / f"steps_{rank}.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "time": time.time(), "process": os.getpid()}) + "\n")


def by_hand(folder: Path, steps: int) -> None:
    """What a careful person writes for torchrun."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DistributedSampler

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model, optimizer, loader = make(steps)
    model = DistributedDataParallel(model)
    sampler = DistributedSampler(loader.dataset, shuffle=False)
    loader = DataLoader(loader.dataset, 64 // WORKERS, sampler=sampler)
    first, saved = 0, folder / "state.pt"
    if saved.exists():
        state = torch.load(saved)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    for step, (x, y) in enumerate(loader):
        if step < first:
            continue
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(STEP_S)
        note(folder, step + 1, rank)
        if (step + 1) % EVERY == 0 and rank == 0:
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            torch.save(state, saved.with_suffix(".half"))
            saved.with_suffix(".half").replace(saved)
    dist.destroy_process_group()


def with_keepstep(folder: Path, steps: int) -> None:
    import keepstep

    run = keepstep.start()
    model, optimizer, loader = run.prepare(*make(steps))
    for x, y in run.steps(loader):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(STEP_S)
        note(folder, run.step + 1, run.rank)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("--by-hand", action="store_true")
    arguments = parser.parse_args()
    (by_hand if arguments.by_hand else with_keepstep)(arguments.folder, arguments.steps)
