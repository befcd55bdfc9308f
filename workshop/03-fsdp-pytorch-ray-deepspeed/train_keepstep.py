"""The same training with keepstep: one file for FSDP, FSDP2 and DeepSpeed's ZeRO; which of them is a flag.

    keepstep run --workers 2 --strategy fsdp2 train_keepstep.py --epochs 3     # or fsdp, zero1, zero2, zero3, ddp
    keepstep run --engine ray --workers 2 --strategy zero3 train_keepstep.py   # on Ray

keepstep's own flags stand before the script: --cpu-offload, --precision bf16, --checkpoint-every, --name, ...
The lines that exist only because training is distributed, and may fail, end with the number of their step:
[1] the run   [2] model, optimizer and data prepared for it   [3] epochs and steps to go on with   [4] sums over workers
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import keepstep  # [1]

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the lessons share models and data
from common import arguments
from common.order import TorchOrder
from common.record import Record
from common.tasks import TASKS, Task


class Total(nn.Module):  # [3]
    """Loss and samples of the epoch so far; saved with the run, which may go on in the middle of an epoch."""

    def __init__(self, device: torch.device) -> None:  # [3]
        super().__init__()  # [3]
        self.register_buffer("sums", torch.zeros(2, dtype=torch.float64, device=device))  # [3]


@torch.no_grad()
def evaluate(run: keepstep.Run, model: nn.Module, task: Task, test: DataLoader[Any]) -> tuple[Tensor, Tensor]:
    """Loss and accuracy over the whole test set, however many workers share it."""
    model.eval()
    loss, right = torch.zeros(2, dtype=torch.float64, device=run.device).unbind()
    for images, labels in test:
        logits = model(task.normalise(images))
        loss = loss + F.cross_entropy(logits, labels, reduction="sum")
        right = right + (logits.argmax(1) == labels).sum()
    model.train()
    num_samples = len(test.dataset)
    return run.sum(loss) / num_samples, run.sum(right) / num_samples  # [4]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    made = arguments.parser(__doc__)
    made.add_argument(
        "--order", choices=["keepstep", "torch"], default="keepstep", help="torch: the raw scripts' order"
    )
    made.add_argument("--clip", type=float, help="clip the gradient's norm, as train_ray_deepspeed.py does at 1.0")
    return arguments.parse(made, argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    task = TASKS[args.task]
    run = keepstep.start()  # [1]
    torch.manual_seed(args.seed)
    model = task.model(args.small)
    optimizer = task.make_optimizer(model, args.lr)
    train_set, test_set = task.datasets(args.data, args.limit)
    order = TorchOrder(len(train_set), args.batch_size, run.world_size, args.seed) if args.order == "torch" else None
    train = DataLoader(train_set, batch_size=args.batch_size, sampler=order, shuffle=order is None)
    test = DataLoader(test_set, batch_size=args.batch_size)
    model, optimizer, train, test = run.prepare(model, optimizer, train, test)  # [2]
    total = run.track("total", Total(run.device))  # [3]

    record = None
    for epoch in run.epochs(args.epochs):  # [3]
        if record is None and run.is_main:  # [4]
            record = Record(args.output, resumed=epoch > 0)
        for images, labels in run.steps(train):  # [3]
            loss = F.cross_entropy(model(task.normalise(images)), labels)
            loss.backward()
            if args.clip:
                run.clip_grad_norm(model, args.clip)
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss=loss)
            seen = torch.stack([loss.detach() * len(labels), torch.tensor(len(labels), device=run.device)])
            total.sums += run.sum(seen)  # [4]
        train_loss, num_samples = total.sums.tolist()
        total.sums.zero_()
        test_loss, accuracy = evaluate(run, model, task, test)
        run.log(test_loss=test_loss, accuracy=accuracy)
        if record is not None:  # [4]
            record.epoch(epoch, train_loss / num_samples, test_loss.item(), accuracy.item(), step=run.step)


if __name__ == "__main__":
    main()
