"""Trains on a Ray data set with raw Ray Train, which gives each worker a shard of the stream.

    python images_to_parquet.py
    python train_ray_data.py --num-workers 2 --epochs 2 --use-gpu False

Lines that exist for the cluster, its data or its faults end with the number of their step: [1] workers and devices,
[2] sharded data, [3] the model on all workers, [4] metrics of all workers, [5] save, [6] restore, [7] the place in the
data, [8] restarts.
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
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the lessons share models and data
from common import arguments, cluster, parquet
from common.consumed import Consumed
from common.record import Record
from common.tasks import TASKS


def parse() -> argparse.Namespace:
    made = arguments.parser(__doc__, task="resnet")
    arguments.add_pace(made)
    cluster.add_arguments(made)
    made.set_defaults(cpus_per_worker=0.5)  # reading and decoding need CPUs that no worker has reserved
    made.add_argument("--images", help="folder of Parquet files (default: OUTPUT/images/TASK)")
    made.add_argument("--no-shuffle", action="store_true", help="rows in the order of the files")
    made.add_argument("--name", default="raw", help="of the run; the same again resumes it (default: %(default)s)")
    made.add_argument("--max-failures", type=int, default=3)
    made.add_argument("--checkpoint-every", type=int, default=5, help="steps; 0: at the end of each epoch only")
    made.add_argument("--resume", choices=["again", "skip"], default="again", help="an epoch that was interrupted")
    args = arguments.parse(made)
    if args.batch_size % args.num_workers:
        made.error(f"--batch-size {args.batch_size} does not divide by {args.num_workers} workers")
    args.images = str(Path(args.images or f"{args.output}/images/{args.task}").resolve())
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

    train = ray.train.get_dataset_shard("train")  # [2]
    _, test_set = task.datasets(args.data, args.limit)
    test_part = Subset(test_set, range(rank, len(test_set), num_workers))  # [2]
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
        if args.resume == "skip":  # [7]
            skipped = saved["batches"]  # [7]
            totals += saved["totals"].to(device) * (rank == 0)  # [7] they are those of all workers

    folder = Path(args.output) / args.name
    consumed = Consumed(folder, rank, from_step=step)
    record = Record(str(folder), resumed=saved is not None) if rank == 0 else None  # [4]
    shuffle = {} if args.no_shuffle else {"local_shuffle_buffer_size": 16 * args.batch_size}
    for epoch in range(start_epoch, args.epochs):
        model.train()
        stream = train.iter_torch_batches(  # [2]
            batch_size=args.batch_size // num_workers, device=device, local_shuffle_seed=args.seed + epoch, **shuffle
        )
        for batches, batch in enumerate(stream, 1):
            if batches <= skipped:  # [7] read, decoded, and thrown away
                continue  # [7]
            loss = F.cross_entropy(model(task.normalise(batch["image"])), batch["label"])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            consumed.add(step, epoch, batch["id"], loss)
            time.sleep(args.pace)
            totals += torch.stack([loss.detach(), torch.ones_like(loss)]) * len(batch["label"])
            if args.checkpoint_every and batches % args.checkpoint_every == 0:  # [5]
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
        totals.zero_()
        skipped = 0  # [7]
        save(model, optimizer, {"step": step, "epoch": epoch + 1, "batches": 0, "totals": totals}, metrics)  # [5]
        if record:  # [4]
            record.epoch(**metrics)  # [4]


def restore() -> dict[str, Any] | None:
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
            plain = model.module if isinstance(model, DistributedDataParallel) else model  # [5]
            torch.save(  # [5]
                state | {"model": plain.state_dict(), "optimizer": optimizer.state_dict()}, f"{folder}/state.pt"
            )
            checkpoint = ray.train.Checkpoint.from_directory(folder)  # [5]
        ray.train.report(metrics, checkpoint=checkpoint)  # [5]


def over_all_workers(totals: Tensor) -> Tensor:
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
    import ray
    from ray.data import ExecutionOptions
    from ray.train import CheckpointConfig, DataConfig, FailureConfig, RunConfig  # [8]
    from ray.train.torch import TorchTrainer  # [1]

    left = ray.cluster_resources()["CPU"] - args.num_workers * args.cpus_per_worker
    if left < 1:
        sys.exit(f"the workers leave {left:g} CPUs for the data, which needs 1: give a smaller --cpus-per-worker")
    print(arguments.describe(args, args.num_workers), flush=True)
    run = RunConfig(  # [8]
        name=args.name,  # [8]
        storage_path=args.output,  # [8]
        failure_config=FailureConfig(max_failures=args.max_failures),  # [8]
        checkpoint_config=CheckpointConfig(num_to_keep=2),  # [8]
    )  # [8]
    TorchTrainer(  # [1]
        train_loop,
        train_loop_config=vars(args),
        scaling_config=scaling,  # [1]
        run_config=run,  # [8]
        datasets={"train": parquet.read(args.images)},  # [2]
        dataset_config=DataConfig(
            execution_options=ExecutionOptions(preserve_order=True)
        ),  # [7] else no two runs agree
    ).fit()


if __name__ == "__main__":
    main()
