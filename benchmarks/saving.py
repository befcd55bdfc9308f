"""What saving a large model costs its training: no saves, keepstep's, and torch DCP's async_save, taking turns."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from measure import RESULTS, Row, Spread, compare, print_table, synchronize, timed, write_json
from torch import nn
from torch.utils.data import DataLoader, Dataset

import keepstep
from keepstep import current

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes" / "gpt"))
from model import GPT

SIZES = {  # about 1.0e9 and 2.6e7 parameters
    "1B": {"sequence": 1024, "num_layers": 20, "num_heads": 16, "hidden": 2048, "dropout": 0.0},
    "25M": {"sequence": 128, "num_layers": 8, "num_heads": 8, "hidden": 512, "dropout": 0.0},
}


class Tokens(Dataset):  # type: ignore[type-arg]
    """Sequences of random bytes: what is in them does not matter here."""

    def __init__(self, sequence: int) -> None:
        self.tokens = torch.randint(0, 256, (1 << 20,))
        self._sequence = sequence

    def __len__(self) -> int:
        return 1 << 24

    def __getitem__(self, index: int) -> torch.Tensor:
        at = index * 131 % (len(self.tokens) - self._sequence - 1)
        return self.tokens[at : at + self._sequence + 1]


def make(size: str, batch: int) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = GPT(**SIZES[size])  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=torch.cuda.is_available())
    return model, optimizer, DataLoader(Tokens(SIZES[size]["sequence"]), batch, shuffle=True)  # type: ignore[arg-type]


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


class Stalls:
    """How long the loop stood still for each save."""

    def __init__(self) -> None:
        self.seconds: list[float] = []


def raw(arguments: argparse.Namespace, device: torch.device, folder: Path | None, stalls: Stalls) -> Iterator[None]:
    """What a careful person writes by hand; saves only with a `folder`."""
    model, optimizer, loader = make(arguments.size, arguments.batch)
    pending = None
    for step, tokens in enumerate(loader, 1):
        with torch.autocast(device.type, torch.bfloat16):
            loss = loss_of(model, tokens.to(device, non_blocking=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if folder is not None and step % arguments.every == arguments.every // 2:
            synchronize(device)
            began = time.perf_counter()
            if pending is not None:
                pending.result()
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            target = folder / f"step_{step}"
            pending = dcp.async_save(state, checkpoint_id=str(target))
            stalls.seconds.append(time.perf_counter() - began)
            for old in folder.glob("step_*"):
                if old != target:
                    shutil.rmtree(old)
        yield


def ours(arguments: argparse.Namespace, device: torch.device, folder: Path, stalls: Stalls) -> Iterator[None]:
    """The same loop with keepstep, which saves by itself: half a period later, so that both fall within a block."""
    run = keepstep.start(
        name="saving", storage=str(folder), device=device.type, precision="bf16", keep=1,
        checkpoint_every=arguments.every,
    )  # fmt: skip
    model, optimizer, train = run.prepare(*make(arguments.size, arguments.batch))
    for tokens in islice(run.steps(train), arguments.every // 2):  # shifts the saves into the middle of the blocks
        step(model, optimizer, tokens)
    ended = None
    for tokens in run.steps(train):
        if ended is not None:
            stalls.seconds.append(time.perf_counter() - ended)
            ended = None
        step(model, optimizer, tokens)
        if (run.step + 1) % arguments.every == 0:
            synchronize(device)
            ended = time.perf_counter()
        yield


def step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> None:
    loss_of(model, tokens).backward()
    optimizer.step()
    optimizer.zero_grad()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="1B" if torch.cuda.is_available() else "25M")
    parser.add_argument("--batch", type=int, default=32 if torch.cuda.is_available() else 8)
    parser.add_argument("--every", type=int, default=50, help="steps between saves; one save falls into each block")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--output", help="write JSON to this file in benchmarks/results/")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29511")
    folder = Path(tempfile.mkdtemp(prefix="keepstep-bench-"))
    stalls = {name: Stalls() for name in ("keepstep", "torch DCP by hand")}
    plain = raw(arguments, device, None, Stalls())
    with_keepstep = ours(arguments, device, folder, stalls["keepstep"])
    seconds: dict[str, list[float]] = {"no saves": [], "keepstep": [], "torch DCP by hand": []}
    try:
        for loop in (plain, with_keepstep):
            list(islice(loop, 3))
        if not dist.is_initialized():
            dist.init_process_group("cpu:gloo", rank=0, world_size=1)
        by_hand = raw(arguments, device, folder, stalls["torch DCP by hand"])
        list(islice(by_hand, 3))
        loops = dict(zip(seconds, (plain, with_keepstep, by_hand), strict=True))
        for number in range(arguments.rounds + 1):  # the first, in which host memory is allocated, is not counted
            for name, loop in loops.items():
                taken = timed(lambda loop=loop: list(islice(loop, arguments.every)), device)  # type: ignore[misc]
                print(f"round {number} {name}: {taken:.2f} s", flush=True)
                if number:
                    seconds[name].append(taken)
        events = [json.loads(line) for line in (folder / "saving" / "events.jsonl").read_text().splitlines()]
        rows: list[Row] = []
        for name, stall in stalls.items():
            pairs = list(zip(seconds["no saves"], seconds[name], strict=True))
            row = compare(f"{arguments.every} steps and a save: {name}", ("no saves", name), pairs, 1.03)
            row.notes["first save blocks"] = f"{stall.seconds[0]:.3f} s"
            row.notes["a later one blocks"] = Spread.of(stall.seconds[1:]).show(" s")
            rows.append(row)
        written = [event["seconds"] for event in events if event["event"] == "checkpoint"]
        rows[0].notes["written beside training in"] = Spread.of(written).show(" s")
        rows[0].notes["parameters"] = f"{sum(p.numel() for p in make(arguments.size, 1)[0].parameters()):,}"
        print_table(rows)
        if arguments.output:
            write_json(RESULTS / arguments.output, rows, {**vars(arguments), "output": None})
    finally:
        current.abandon()
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)  # the loops have no end of their own


if __name__ == "__main__":
    main()
