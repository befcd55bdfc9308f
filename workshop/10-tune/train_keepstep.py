"""The training that `keepstep tune` searches with: it knows nothing of the search.

    python train_keepstep.py --epochs 3 --lr 1e-3                                           # one training
    keepstep tune --method grid --space "lr=grid(1e-4,1e-3,1e-2)" --metric accuracy:max train_keepstep.py --epochs 3

Lines that are there for keepstep end with the number of their step: [1] start  [2] prepare  [3] epochs and steps
[4] metrics
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the lessons share models and data

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

import keepstep  # [1]
from common import arguments
from common.order import TorchOrder
from common.tasks import TASKS


def main() -> None:
    made = arguments.parser(__doc__, task="resnet")
    made.add_argument("--order", choices=["keepstep", "torch"], default="keepstep", help="torch: as tune_ray.py")
    args = arguments.parse(made)
    task = TASKS[args.task]
    run = keepstep.start(storage=f"{args.output}/runs")  # [1]

    torch.manual_seed(args.seed)
    model = task.model(args.small)
    optimizer = task.make_optimizer(model, args.lr)
    train_set, test_set = task.datasets(args.data, args.limit)
    order = TorchOrder(len(train_set), args.batch_size, run.world_size, args.seed) if args.order == "torch" else None
    train = DataLoader(train_set, args.batch_size, sampler=order, shuffle=order is None)
    test = DataLoader(test_set, args.batch_size)
    model, optimizer, train, test = run.prepare(model, optimizer, train, test)  # [2]

    for epoch in run.epochs(args.epochs):  # [3]
        model.train()
        train_loss = torch.zeros((), device=run.device)
        for images, labels in run.steps(train):  # [3]
            loss = F.cross_entropy(model(task.normalise(images)), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss=loss)  # [4]
            train_loss += loss.detach() * len(labels)
        model.eval()
        test_loss, right = torch.zeros(2, device=run.device).unbind()
        with torch.no_grad():
            for images, labels in test:
                logits = model(task.normalise(images))
                test_loss = test_loss + F.cross_entropy(logits, labels, reduction="sum")
                right = right + (logits.argmax(1) == labels).sum()
        accuracy = run.sum(right) / len(test_set)  # [4]
        run.log(train_loss=run.sum(train_loss) / len(train_set), test_loss=run.sum(test_loss) / len(test_set))  # [4]
        run.log(accuracy=accuracy)  # [4]
        run.print(f"epoch {epoch}: accuracy {accuracy:.2%}")


if __name__ == "__main__":
    main()
