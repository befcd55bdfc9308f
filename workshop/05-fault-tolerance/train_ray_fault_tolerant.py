"""Trains with raw Ray Train so that it survives the death of workers, as Ray's documentation has it.

    python train_ray_fault_tolerant.py --num-workers 2 --epochs 3 --use-gpu False --name mine

The same --name again goes on where that run was. Lines that exist for the cluster or for its faults end with the
number of their step: [1] workers and devices, [2] sharded data, [3] the model on all workers, [4] metrics of all
workers, [5] save, [6] restore, [7] the place in the data, [8] restarts.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the lessons share models and data
from common import arguments, cluster
from common.consumed import Consumed
from common.record import Record
from common.tasks import TASKS


def parse() -> argparse.Namespace:
    made = arguments.parser(__doc__)
    arguments.add_pace(made)
    cluster.add_arguments(made)
    made.add_argument("--name", default="raw", help="of the run; the same again resumes it (default: %(default)s)")
    made.add_argument("--max-failures", type=int, default=3)
    made.add_argument("--checkpoint-every", type=int, default=5, help="steps; 0: at the end of each epoch only")
    made.add_argument(
        "--resume",
        choices=["again", "next", "skip"],
        default="again",
        help="an epoch that was interrupted: begin it again, go on with the next, or skip the batches it had",
    )
    args = arguments.parse(made)
    if args.batch_size % args.num_workers:
        made.error(f"--batch-size {args.batch_size} does not divide by {args.num_workers} workers")
    return args


def train_loop(config: dict[str, Any]) -> None:
    import ray.train  # [1]
    import ray.train.torch  # [1]

    args = argparse.Namespace(**config)
    task = TASKS[args.task]
    context = ray.train.get_context()  # [1]
    rank, num_workers = context.get_world_rank(), context.get_world_size()  # [1]
    device = ray.train.torch.get_device()  # [1]
    torch.manual_seed(args.seed)
    model = task.model(args.small)

    train_set, test_set = task.datasets(args.data, args.limit)
    train_set = TensorDataset(*train_set.tensors, torch.arange(len(train_set)))  # the ids are what is counted
    sampler = DistributedSampler(train_set, num_workers, rank, seed=args.seed)  # [2]
    train = DataLoader(train_set, args.batch_size // num_workers, sampler=sampler)  # [2]
    test_part = Subset(test_set, range(rank, len(test_set), num_workers))  # [2] unlike a sampler's, without repeats
    test = DataLoader(test_part, args.batch_size // num_workers)  # [2]

    saved = restore()  # [6]
    if saved:  # [6]
        model.load_state_dict(saved["model"])  # [6]
    model = ray.train.torch.prepare_model(model)  # [3]
    optimizer = task.make_optimizer(model, args.lr)
    totals = torch.zeros(2, dtype=torch.float64, device=device)  # of this worker in this epoch: loss, samples
    step = start_epoch = skipped = 0
    if saved:  # [6]
        optimizer.load_state_dict(saved["optimizer"])  # [6]
        step, start_epoch = saved["step"], saved["epoch"]  # [7]
        if saved["batches"] == len(train) or args.resume == "next":  # [7]
            start_epoch += 1  # [7]
        elif args.resume == "skip":  # [7]
            skipped = saved["batches"]  # [7]
            totals += saved["totals"].to(device) * (rank == 0)  # [7] they are those of all workers

    folder = Path(args.output) / args.name
    consumed = Consumed(folder, rank, from_step=step)
    record = Record(str(folder), resumed=saved is not None) if rank == 0 else None  # [4]
    for epoch in range(start_epoch, args.epochs):
        sampler.set_epoch(epoch)  # [2]
        model.train()
        for batches, (images, labels, ids) in enumerate(train, 1):
            if batches <= skipped:  # [7] read, and thrown away
                continue  # [7]
            images, labels = images.to(device), labels.to(device)
            loss = F.cross_entropy(model(task.normalise(images)), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            consumed.add(step, epoch, ids, loss)
            time.sleep(args.pace)
            totals += torch.stack([loss.detach(), torch.ones_like(loss)]) * len(labels)
            if args.checkpoint_every and batches % args.checkpoint_every == 0 and batches < len(train):  # [5]
                state = {"step": step, "epoch": epoch, "batches": batches, "totals": over_all_workers(totals)}  # [5]
                save(model, optimizer, state, {"step": step, "epoch": epoch})  # [5]

        train_loss, num_samples = over_all_workers(totals).tolist()  # [4]
        test_loss, correct = over_all_workers(evaluate(model, test, task, device)).tolist()  # [4]
        metrics = {
            "epoch": epoch,
            "train_loss": train_loss / num_samples,
            "test_loss": test_loss / len(test_set),
            "accuracy": correct / len(test_set),
        }
        save(model, optimizer, {"step": step, "epoch": epoch, "batches": len(train)}, metrics)  # [5]
        if record:  # [4]
            record.epoch(**metrics)  # [4]
        totals.zero_()
        skipped = 0  # [7]
    if rank == 0:  # [4]
        save_file(unwrapped(model).state_dict(), folder / "weights.safetensors")


def restore() -> dict[str, Any] | None:  # [6]
    """What the newest checkpoint of this run holds, after a failure or under the same name."""
    import ray.train  # [6]

    checkpoint = ray.train.get_checkpoint()  # [6]
    if checkpoint is None:  # [6]
        return None  # [6]
    with checkpoint.as_directory() as folder:  # [6]
        saved: dict[str, Any] = torch.load(Path(folder) / "state.pt", map_location="cpu")  # [6]
    return saved  # [6]


def save(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any], metrics: dict[str, Any]) -> None:
    """Rank 0 writes; all report, for a report waits for all."""
    import ray.train  # [5]

    with tempfile.TemporaryDirectory() as folder:  # [5]
        checkpoint = None  # [5]
        if ray.train.get_context().get_world_rank() == 0:  # [5]
            state |= {"model": unwrapped(model).state_dict(), "optimizer": optimizer.state_dict()}  # [5]
            torch.save(state, Path(folder) / "state.pt")  # [5]
            checkpoint = ray.train.Checkpoint.from_directory(folder)  # [5]
        ray.train.report(metrics, checkpoint=checkpoint)  # [5]


def unwrapped(model: nn.Module) -> nn.Module:  # [3]
    """One worker's model is not wrapped."""
    return model.module if isinstance(model, DistributedDataParallel) else model  # [3]


def over_all_workers(totals: Tensor) -> Tensor:  # [4]
    summed = totals.clone()  # [4]
    dist.all_reduce(summed)  # [4]
    return summed  # [4]


@torch.no_grad()
def evaluate(model: nn.Module, test: DataLoader[Any], task: Any, device: torch.device) -> Tensor:
    """The summed loss and the right answers on this worker's part of the test set."""
    model.eval()
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    for images, labels in test:
        images, labels = images.to(device), labels.to(device)
        logits = model(task.normalise(images))
        loss = F.cross_entropy(logits, labels, reduction="sum")
        totals += torch.stack([loss, (logits.argmax(1) == labels).sum()])
    return totals


def main() -> None:
    args = parse()
    # Ray takes up a checkpoint when it next looks at its workers, every 2 s: 20 steps of a lesson, none of a real run.
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.1")
    scaling = cluster.connect(args.num_workers, args.use_gpu, args.cpus_per_worker, args.address)  # [1]
    from ray.train import CheckpointConfig, FailureConfig, RunConfig  # [8]
    from ray.train.torch import TorchTrainer  # [1]

    print(arguments.describe(args, args.num_workers), flush=True)
    run = RunConfig(  # [8]
        name=args.name,  # [8]
        storage_path=args.output,  # [8]
        failure_config=FailureConfig(max_failures=args.max_failures),  # [8]
        checkpoint_config=CheckpointConfig(num_to_keep=2),  # [8]
    )  # [8]
    TorchTrainer(train_loop, train_loop_config=vars(args), scaling_config=scaling, run_config=run).fit()  # [1]


if __name__ == "__main__":
    main()
