"""The training of lesson 01 on Ray Train: Ray starts the workers, joins them and restarts them after a failure.

    python train_ray_ddp.py --num-workers 2 --epochs 3
    python train_ray_ddp.py --num-workers 2 --epochs 3 --use-gpu False
    python train_ray_ddp.py --num-workers 2 --epochs 3 --name vit      # the same name again goes on where it was

What a single process does not need is marked with the number of its step:
    [1] connect and ask for workers        [4] divide the data         [7] save, and report what all have seen
    [2] hand the settings to the workers   [5] shuffle anew            [8] go on from what was saved
    [3] wrap the model                     [6] add up                  [9] say where, and how often to try again
"""

from __future__ import annotations

import sys
import tempfile  # [7]
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist  # [6]
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, Subset  # [4]

sys.path.insert(0, str(Path(__file__).absolute().parents[1]))  # the lessons share models and data
from common import cluster
from common.arguments import describe, parse, parser
from common.record import Record
from common.tasks import TASKS, Task


@torch.no_grad()
def evaluate(model: nn.Module, task: Task, test: DataLoader, device: torch.device) -> Tensor:
    """Sums over this worker's part of the test set: loss, correct."""
    model.eval()
    loss, correct = torch.zeros(2, device=device)
    for images, labels in test:
        logits = model(task.normalise(images))
        loss += F.cross_entropy(logits, labels, reduction="sum")
        correct += (logits.argmax(1) == labels).sum()
    model.train()
    return torch.stack([loss, correct])


def train_worker(config: dict[str, Any]) -> None:
    """What every worker runs; the process group is there already."""
    import ray.train  # [1]
    import ray.train.torch  # [1]

    args = Namespace(**config)  # [2]
    context = ray.train.get_context()  # [2]
    rank, world_size = context.get_world_rank(), context.get_world_size()  # [2]
    device = ray.train.torch.get_device()  # [3]
    task = TASKS[args.task]
    torch.manual_seed(args.seed)
    model = ray.train.torch.prepare_model(task.model(args.small))  # [3]
    plain_model = getattr(model, "module", model)  # one worker's model is not wrapped  # [3]
    optimizer = task.make_optimizer(model, args.lr)
    if context.get_local_rank() != 0:  # [4]
        dist.barrier()  # [4]
    train_set, test_set = task.datasets(args.data, args.limit)
    if context.get_local_rank() == 0:  # [4]
        dist.barrier()  # [4]
    # prepare_data_loader would add a sampler too, but with seed 0, and none for one worker.
    sampler = DistributedSampler(train_set, seed=args.seed)  # [4]
    train = DataLoader(train_set, args.batch_size // world_size, sampler=sampler)  # [4]
    # A DistributedSampler would repeat samples until all workers have as many; a test set must count each once.
    test = DataLoader(Subset(test_set, range(rank, len(test_set), world_size)), args.batch_size // world_size)  # [4]
    train = ray.train.torch.prepare_data_loader(train)  # [4]
    test = ray.train.torch.prepare_data_loader(test, add_dist_sampler=False)  # [4]

    first_epoch = 0  # [8]
    if checkpoint := ray.train.get_checkpoint():  # [8]
        with checkpoint.as_directory() as folder:  # [8]
            saved = torch.load(Path(folder) / "checkpoint.pt", map_location=device, weights_only=True)  # [8]
        plain_model.load_state_dict(saved["model"])  # [8]
        optimizer.load_state_dict(saved["optimizer"])  # [8]
        first_epoch = saved["epoch"] + 1  # [8]
    if rank == 0:  # [7]
        record = Record(args.output, resumed=first_epoch > 0)

    for epoch in range(first_epoch, args.epochs):
        sampler.set_epoch(epoch)  # [5]
        seen = torch.zeros(2, device=device)  # [6]
        for images, labels in train:
            loss = F.cross_entropy(model(task.normalise(images)), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen += torch.stack([loss.detach() * len(labels), torch.tensor(float(len(labels)), device=device)])  # [6]
        # As in lesson 01: everybody gets rank 0's batch norm statistics, and uses the model within DDP.
        for buffer in plain_model.buffers():  # [3]
            dist.broadcast(buffer, 0)  # [3]
        sums = torch.cat([seen, evaluate(plain_model, task, test, device)])  # [6]
        dist.all_reduce(sums)  # report() passes on what rank 0 says, and adds up nothing  # [6]
        train_loss, trained, test_loss, correct = sums.tolist()  # [6]
        metrics = {"epoch": epoch, "train_loss": train_loss / trained,
                   "test_loss": test_loss / len(test_set), "accuracy": correct / len(test_set)}  # fmt: skip
        if rank == 0:  # [7]
            record.epoch(**metrics)
        with tempfile.TemporaryDirectory() as folder:  # [7]
            checkpoint = None  # [7]
            if rank == 0:  # [7]
                state = {"model": plain_model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}  # [7]
                torch.save(state, Path(folder) / "checkpoint.pt")  # [7]
                checkpoint = ray.train.Checkpoint.from_directory(folder)  # [7]
            ray.train.report(metrics, checkpoint=checkpoint)  # every worker must, as often as the others  # [7]


def fit(args: Namespace) -> Any:
    """Trains on `args.num_workers` workers; returns Ray's Result."""
    TASKS[args.task].datasets(
        args.data, args.limit
    )  # what is missing is said now, not by every worker, and again  # [4]
    scaling = cluster.connect(args.num_workers, args.use_gpu, args.cpus_per_worker, args.address)  # [1]
    from ray.train import CheckpointConfig, FailureConfig, RunConfig  # [9]
    from ray.train.torch import TorchTrainer  # [1]

    run_config = RunConfig(  # [9]
        name=args.name,  # [9]
        storage_path=args.output,  # [9]
        failure_config=FailureConfig(max_failures=args.max_failures),  # [9]
        checkpoint_config=CheckpointConfig(num_to_keep=2),  # [9]
    )  # [9]
    trainer = TorchTrainer(  # [1]
        train_worker,  # [1]
        train_loop_config=vars(args),  # [2]
        scaling_config=scaling,  # [1]
        run_config=run_config,  # [9]
    )  # [1]
    return trainer.fit()  # [1]


def main() -> None:
    made = parser(__doc__)
    cluster.add_arguments(made)  # [1]
    made.add_argument("--name", default=f"ray-{time.strftime('%Y%m%d-%H%M%S')}", help="of the run")  # [9]
    made.add_argument("--max-failures", type=int, default=3, help="failures forgiven (default: %(default)s)")  # [9]
    args = parse(made)
    if args.num_workers > 0 and args.batch_size % args.num_workers:  # [4]
        made.error(f"--batch-size {args.batch_size} does not divide between {args.num_workers} workers")  # [4]
    print(describe(args, args.num_workers))
    result = fit(args)  # [1]
    print(f"last: {result.metrics}\ncheckpoint: {result.checkpoint.path}")  # [7]


if __name__ == "__main__":
    main()
