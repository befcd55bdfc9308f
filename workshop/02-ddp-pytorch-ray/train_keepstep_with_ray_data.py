"""The same training with keepstep, its images read by Ray Data: every row exactly once an epoch, through any crash.

    keepstep run --engine ray --workers 2 --cpus-per-worker 0.5 train_keepstep_with_ray_data.py --epochs 3
    python train_keepstep_with_ray_data.py --epochs 3 --order file                       # one process, no shuffling

What a single process does not need is marked with the number of its step:
    [1] start or resume a run        [2] prepare for many workers        [3] the loop        [4] metrics of all
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import keepstep  # [1]

sys.path.insert(0, str(Path(__file__).absolute().parents[1]))  # the lessons share models and data
from common.arguments import describe, parse, parser
from common.ray_images import images
from common.tasks import TASKS, Task


@torch.no_grad()
def evaluate(run: keepstep.Run, model: nn.Module, task: Task, test: keepstep.RayData) -> tuple[Tensor, Tensor]:
    """Loss and accuracy over the whole test set."""
    model.eval()
    sums = torch.zeros(3, device=run.device)
    for batch in test:
        logits = model(task.normalise(batch["image"]))
        loss = F.cross_entropy(logits, batch["label"], reduction="sum")
        correct = (logits.argmax(1) == batch["label"]).sum()
        sums += torch.stack([loss, correct, torch.tensor(len(logits), device=run.device)])
    model.train()
    test_loss, correct, tested = run.sum(sums)  # [4]
    return test_loss / tested, correct / tested


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--order", choices=("shuffled", "file"), default="shuffled")
    made.add_argument("--ids", action="store_true", help="note the rows of every batch in the run's folder")
    args = parse(made)
    run = keepstep.start(storage=args.output, device="cuda" if args.use_gpu else "cpu")  # [1]
    run.print(describe(args, run.world_size))  # [4]
    task = TASKS[args.task]

    torch.manual_seed(args.seed)
    model = task.model(args.small)
    optimizer = task.make_optimizer(model, args.lr)
    read = partial(images, args.task, data=args.data, limit=args.limit, rows_per_block=args.batch_size)
    train = keepstep.RayData(partial(read, split="train"), args.batch_size, shuffle=args.order == "shuffled")
    test = keepstep.RayData(partial(read, split="test"), args.batch_size)
    model, optimizer, train, test = run.prepare(model, optimizer, train, test)  # [2]

    for epoch in run.epochs(args.epochs):  # [3]
        for batch in run.steps(train):  # [3]
            loss = F.cross_entropy(model(task.normalise(batch["image"])), batch["label"])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.log(train_loss=loss)  # [4]
            if args.ids:
                with (run.path / f"ids_rank_{run.rank}.jsonl").open("a") as file:
                    file.write(json.dumps(batch["id"].tolist()) + "\n")
        test_loss, accuracy = evaluate(run, model, task, test)
        run.log(test_loss=test_loss, accuracy=accuracy)  # [4]
        run.print(f"epoch {epoch}: test loss {test_loss:.4f}, accuracy {accuracy:.2%}")  # [4]


if __name__ == "__main__":
    main()
