"""Trains on the same Ray data set with keepstep: each row exactly once an epoch, whatever dies.

    python images_to_parquet.py
    keepstep run --workers 2 --checkpoint-every 5 --name mine train_keepstep.py --epochs 2 --use-gpu False

Lines that exist because training is distributed end with the number of their step: [1] the run, [2] what it prepares,
[3] its loops, [4] metrics of all workers.
"""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import keepstep

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the lessons share models and data
from common import arguments, parquet
from common.consumed import Consumed
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


def parse() -> argparse.Namespace:
    made = arguments.parser(__doc__, task="resnet")
    arguments.add_pace(made)
    made.add_argument("--images", help="folder of Parquet files (default: OUTPUT/images/TASK)")
    made.add_argument("--no-shuffle", action="store_true", help="rows in the order of the files")
    args = arguments.parse(made)
    args.images = args.images or f"{args.output}/images/{args.task}"
    return args


def main() -> None:
    args = parse()
    run = keepstep.start()  # [1]
    task = TASKS[args.task]
    run.print(arguments.describe(args, run.world_size))
    torch.manual_seed(args.seed)
    model = task.model(args.small)
    optimizer = task.make_optimizer(model, args.lr)

    ray.cloudpickle.register_pickle_by_value(parquet)  # Ray's own processes do not find the lessons' modules
    train = keepstep.RayData(partial(parquet.read, args.images), args.batch_size, shuffle=not args.no_shuffle)  # [2]
    _, test_set = task.datasets(args.data, args.limit)
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
        for batch in run.steps(train):  # [3]
            loss = F.cross_entropy(model(task.normalise(batch["image"])), batch["label"])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss=loss)  # [4]
            consumed.add(run.step + 1, epoch, batch["id"], loss)
            time.sleep(args.pace)
            totals.values += run.sum(
                torch.stack([loss.detach(), torch.ones_like(loss)]) * len(batch["label"])
            ).cpu()  # [4]

        train_loss, num_samples = totals.values.tolist()
        test_loss, correct = run.sum(evaluate(model, test, task, run.device)).tolist()  # [4]
        if record:  # [4]
            record.epoch(epoch, train_loss / num_samples, test_loss / len(test_set), correct / len(test_set))
        totals.values = torch.zeros(2, dtype=torch.float64)


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
