"""Trains on a Ray data set, notes every row that a step saw, and dies where it is told to."""

from __future__ import annotations

import argparse
import json
import os
import signal
from typing import Any

import numpy as np
import ray.data
import torch
from torch import nn

import keepstep


def rows(count: int, blocks: int, kind: str, ballast: int = 0) -> Any:
    if kind == "in memory":  # which connects every worker to a Ray at once, each to its own if there is no address
        dataset = ray.data.from_items([{"id": number} for number in range(count)], override_num_blocks=blocks)
    else:
        dataset = ray.data.range(count, override_num_blocks=blocks)
    if kind == "uneven":  # a filter, and then some rows several times: nobody can know how many there will be
        dataset = dataset.filter(lambda row: row["id"] % 5 != 0)
        dataset = dataset.flat_map(lambda row: [{"id": row["id"] * 10 + copy} for copy in range(row["id"] % 3)])
    dataset = dataset.map_batches(lambda batch: {**batch, "x": np.sin(np.outer(batch["id"], np.arange(1, 5)))})
    if ballast:
        dataset = dataset.map_batches(lambda b: {**b, "ballast": np.zeros((len(b["id"]), ballast), np.uint8)})
    return dataset


def die_if_told(run: keepstep.Run, plan: list[str]) -> None:
    """STEP:RANK, each once in the run's life; rank -1: all."""
    for entry in plan:
        step, rank = map(int, entry.split(":"))
        mark = run.path / f"killed_{entry}_{run.rank}"
        if run.step >= step and rank in (-1, run.rank) and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", choices=["even", "uneven", "in memory"], default="even")
    parser.add_argument("--rows", type=int, default=500)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--ballast", type=int, default=0, help="bytes that a row has beside the rest")
    parser.add_argument("--kill", nargs="*", default=[])
    args = parser.parse_args()
    run = keepstep.start()
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    in_memory = args.kind == "in memory"
    dataset = rows(args.rows, 70, args.kind) if in_memory else lambda: rows(args.rows, 70, args.kind, args.ballast)
    train = keepstep.RayData(dataset, 12, shuffle=True, window_rows=60)
    test = keepstep.RayData(lambda: rows(50, 4, "even"), 12)
    model, optimizer, train, test = run.prepare(model, optimizer, train, test)
    for _ in run.epochs(args.epochs):
        for batch in run.steps(train):
            loss = model(batch["x"].float()).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss=loss)
            note_rows(run, batch["id"])
            die_if_told(run, args.kill)
        tested = sum(len(batch["id"]) for batch in test)
        run.log(tested=run.sum(tested))


def note_rows(run: keepstep.Run, ids: torch.Tensor) -> None:
    whole = run.gather(ids[: run._batch.num_samples])  # type: ignore[union-attr]
    if run.is_main:
        with (run.path / "rows.jsonl").open("a") as file:
            entry = {"step": run.step + 1, "epoch": run.epoch, "ids": whole.tolist(), "workers": run.world_size}
            file.write(json.dumps(entry) + "\n")


if __name__ == "__main__":
    main()
