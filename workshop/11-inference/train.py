"""Trains the model that this lesson predicts with, and says in model.json what it is.

python train.py --epochs 4 --lr 1e-2
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the lessons share models and data

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

import keepstep
from common import arguments
from common.classifier import describe_model
from common.tasks import TASKS


def main() -> None:
    args = arguments.parse(arguments.parser(__doc__, task="resnet"))
    task = TASKS[args.task]
    run = keepstep.start(name="digits", storage=f"{args.output}/runs")

    torch.manual_seed(args.seed)
    model = task.model(args.small)
    optimizer = task.make_optimizer(model, args.lr)
    train_set, test_set = task.datasets(args.data, args.limit)
    train = DataLoader(train_set, args.batch_size, shuffle=True)
    test = DataLoader(test_set, args.batch_size)
    model, optimizer, train, test = run.prepare(model, optimizer, train, test)
    if run.is_main:
        describe_model(args.output, args.task, args.small)

    for epoch in run.epochs(args.epochs):
        model.train()
        for images, labels in run.steps(train):
            loss = F.cross_entropy(model(task.normalise(images)), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss=loss)
        model.eval()
        with torch.no_grad():
            right = sum((model(task.normalise(images)).argmax(1) == labels).sum() for images, labels in test)
        accuracy = run.sum(right) / len(test_set)
        run.log(accuracy=accuracy)
        run.print(f"epoch {epoch}: accuracy {accuracy:.2%}")


if __name__ == "__main__":
    main()
