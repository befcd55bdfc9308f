"""Trains on one device, in one process: what every other script of these lessons is compared with.

python train_single_machine.py --epochs 3
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, RandomSampler

sys.path.insert(0, str(Path(__file__).parents[1]))  # the lessons share models and data
from common.arguments import describe, parse, parser
from common.record import Record
from common.tasks import TASKS, Task


@torch.no_grad()
def evaluate(model: nn.Module, task: Task, test: DataLoader, device: torch.device) -> tuple[float, float]:
    """Loss and accuracy over the whole test set."""
    model.eval()
    loss, correct = torch.zeros(2, device=device)
    for images, labels in test:
        images, labels = images.to(device), labels.to(device)
        logits = model(task.normalise(images))
        loss += F.cross_entropy(logits, labels, reduction="sum")
        correct += (logits.argmax(1) == labels).sum()
    model.train()
    return loss.item() / len(test.dataset), correct.item() / len(test.dataset)


def main() -> None:
    args = parse(parser(__doc__))
    print(describe(args, 1))
    task = TASKS[args.task]
    device = torch.device("cuda" if args.use_gpu else "cpu")

    torch.manual_seed(args.seed)
    model = task.model(args.small).to(device)
    optimizer = task.make_optimizer(model, args.lr)
    train_set, test_set = task.datasets(args.data, args.limit)
    shuffling = torch.Generator()
    train = DataLoader(train_set, args.batch_size, sampler=RandomSampler(train_set, generator=shuffling))
    test = DataLoader(test_set, args.batch_size)
    record = Record(args.output)

    for epoch in range(args.epochs):
        shuffling.manual_seed(args.seed + epoch)  # the order that DistributedSampler makes, too
        total = torch.zeros((), device=device)
        for images, labels in train:
            images, labels = images.to(device), labels.to(device)
            loss = F.cross_entropy(model(task.normalise(images)), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total += loss.detach() * len(labels)
        test_loss, accuracy = evaluate(model, task, test, device)
        record.epoch(epoch, total.item() / len(train_set), test_loss, accuracy)
    torch.save(model.state_dict(), Path(args.output) / "model.pt")


if __name__ == "__main__":
    main()
