"""Trains the same with keepstep: the faults are its affair.

    keepstep run --workers 2 --checkpoint-every 5 --name mine train_keepstep.py --epochs 3 --use-gpu False

The same --name again goes on where that run was. Lines that exist because training is distributed end with the number
of their step: [1] the run, [2] what it prepares, [3] its loops, [4] metrics of all workers.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import keepstep

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the lessons share models and data
from common import arguments
from common.consumed import Consumed
from common.order import TorchOrder
from common.record import Record
from common.tasks import TASKS


class Totals:
    """Loss and samples of the epoch on all workers; saved with the run, for an epoch may be interrupted."""

    def __init__(self) -> None:
        self.values = torch.zeros(2, dtype=torch.float64)

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state["values"].clone()


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    made = arguments.parser(__doc__)
    arguments.add_pace(made)
    made.add_argument("--order", choices=["keepstep", "torch"], default="keepstep", help="torch: as the raw version's")
    return arguments.parse(made, argv)


def main() -> None:
    args = parse()
    run = keepstep.start()  # [1]
    task = TASKS[args.task]
    run.print(arguments.describe(args, run.world_size))
    torch.manual_seed(args.seed)
    model = task.model(args.small)
    optimizer = task.make_optimizer(model, args.lr)

    train_set, test_set = task.datasets(args.data, args.limit)
    train_set = TensorDataset(*train_set.tensors, torch.arange(len(train_set)))  # the ids are what is counted
    sampler = TorchOrder(len(train_set), args.batch_size, run.world_size, args.seed) if args.order == "torch" else None
    train = DataLoader(train_set, args.batch_size, shuffle=sampler is None, sampler=sampler)
    test = DataLoader(test_set, args.batch_size)
    model, optimizer, train, test = run.prepare(model, optimizer, train, test)  # [2]
    totals = run.track("totals", Totals())  # [4]

    folder = Path(args.output) / run.name
    consumed = record = None
    for epoch in run.epochs(args.epochs):  # [3]
        consumed = consumed or Consumed(folder, run.rank, from_step=run.step)
        if run.is_main:  # [4]
            record = record or Record(str(folder), resumed=run.step > 0)
        model.train()
        for images, labels, ids in run.steps(train):  # [3]
            loss = F.cross_entropy(model(task.normalise(images)), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss=loss)  # [4]
            consumed.add(run.step + 1, epoch, ids, loss)
            time.sleep(args.pace)
            totals.values += run.sum(torch.stack([loss.detach(), torch.ones_like(loss)]) * len(labels)).cpu()  # [4]

        train_loss, num_samples = totals.values.tolist()
        test_loss, correct = run.sum(evaluate(model, test, task, run.device)).tolist()  # [4]
        if record:  # [4]
            record.epoch(epoch, train_loss / num_samples, test_loss / len(test_set), correct / len(test_set))
        totals.values = torch.zeros(2, dtype=torch.float64)
    run.save("weights.safetensors", model.state_dict())  # into the run's folder, artifacts/


@torch.no_grad()
def evaluate(model: nn.Module, test: DataLoader[Any], task: Any, device: torch.device) -> Tensor:
    """The summed loss and the right answers on this worker's part of the test set."""
    model.eval()
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    for images, labels in test:
        logits = model(task.normalise(images))
        loss = F.cross_entropy(logits, labels, reduction="sum")
        totals += torch.stack([loss, (logits.argmax(1) == labels).sum()])
    return totals


if __name__ == "__main__":
    main()
