"""The same training with keepstep: one script for one process, torchrun and Ray, which goes on after any crash.

    python train_keepstep.py --epochs 3                                         # one process
    torchrun --nproc_per_node=2 train_keepstep.py --epochs 3
    keepstep run --workers 2 train_keepstep.py --epochs 3                       # + restarts, logs, a report
    keepstep run --engine ray --workers 2 train_keepstep.py --epochs 3          # the same on a Ray cluster

What a single process does not need is marked with the number of its step:
    [1] start or resume a run        [2] prepare for many workers        [3] the loop        [4] metrics of all
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import keepstep  # [1]

sys.path.insert(0, str(Path(__file__).absolute().parents[1]))  # the lessons share models and data
from common.arguments import describe, parse, parser
from common.order import TorchOrder
from common.tasks import TASKS, Task


@torch.no_grad()
def evaluate(run: keepstep.Run, model: nn.Module, task: Task, test: DataLoader) -> tuple[Tensor, Tensor]:
    """Loss and accuracy over the whole test set."""
    model.eval()
    loss, correct = torch.zeros(2, device=run.device)
    for images, labels in test:
        logits = model(task.normalise(images))
        loss += F.cross_entropy(logits, labels, reduction="sum")
        correct += (logits.argmax(1) == labels).sum()
    model.train()
    return run.sum(loss) / len(test.dataset), run.sum(correct) / len(test.dataset)  # [4]


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--order", choices=("keepstep", "torch"), default="keepstep", help="torch: to compare digits")
    args = parse(made)
    run = keepstep.start(storage=args.output, device="cuda" if args.use_gpu else "cpu")  # [1]
    run.print(describe(args, run.world_size))  # [4]
    task = TASKS[args.task]

    torch.manual_seed(args.seed)
    model = task.model(args.small)
    optimizer = task.make_optimizer(model, args.lr)
    train_set, test_set = task.datasets(args.data, args.limit)
    # keepstep's own shuffle=True needs no sampler; torch's order is there to get the same digits as the other scripts.
    order = TorchOrder(len(train_set), args.batch_size, run.world_size, args.seed) if args.order == "torch" else None
    train = DataLoader(train_set, args.batch_size, sampler=order, shuffle=None if order else True)
    test = DataLoader(test_set, args.batch_size)
    model, optimizer, train, test = run.prepare(model, optimizer, train, test)  # [2]

    for epoch in run.epochs(args.epochs):  # [3]
        for images, labels in run.steps(train):  # [3]
            loss = F.cross_entropy(model(task.normalise(images)), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.log(train_loss=loss)  # [4]
        test_loss, accuracy = evaluate(run, model, task, test)
        run.log(test_loss=test_loss, accuracy=accuracy)  # [4]
        run.print(f"epoch {epoch}: test loss {test_loss:.4f}, accuracy {accuracy:.2%}")  # [4]


if __name__ == "__main__":
    main()
