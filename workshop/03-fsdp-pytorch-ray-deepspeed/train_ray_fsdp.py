"""Trains with torch's first FSDP on Ray Train: weights, gradients and optimizer state in shards.

    python train_ray_fsdp.py --num-workers 2 --batch-size 256 [--use-gpu False]

The lines that exist only because training is distributed, and may fail, end with the number of their step:
[1] workers: what Ray starts, and how often it starts it again   [2] place: rank, number of workers, device
[3] data: each worker's part of every batch, another order each epoch   [4] sharding the model
[5] numbers of all workers in one   [6] checkpoints   [7] going on from one

The model is wrapped by hand. Ray's prepare_model(model, parallel_strategy="fsdp") refuses to on CPUs; on GPUs it first
moves the whole model to one, and without an auto_wrap_policy makes one unit of it, gathered whole in each forward.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile  # [6]
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist  # [5]
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler  # [3]

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the lessons share models and data
from common import arguments, cluster
from common.record import Record
from common.resnet import BasicBlock
from common.tasks import TASKS, Task
from common.vit import Block


def train(config: dict[str, Any]) -> None:
    """What every worker runs."""
    import ray.train  # [1]
    from ray.train.torch import get_device  # [2]

    args = argparse.Namespace(**config)  # [1]
    task = TASKS[args.task]
    rank, num_workers = dist.get_rank(), dist.get_world_size()  # [2]
    device = get_device()  # [2]
    if device.type == "cuda":  # [2]
        torch.cuda.set_device(device)  # [2]

    torch.manual_seed(args.seed)  # the same weights on every worker: each keeps its shard of its own
    model = shard(task.model(args.small), device)  # [4]
    optimizer = task.make_optimizer(model, args.lr)  # after sharding, so that its moments are shards, too
    train_set, test_set = task.datasets(args.data, args.limit)
    sampler = DistributedSampler(train_set, shuffle=True, seed=args.seed)  # [3]
    train_loader = DataLoader(train_set, batch_size=args.batch_size // num_workers, sampler=sampler)  # [3]
    test_sampler = DistributedSampler(test_set, shuffle=False)  # [3]
    test_loader = DataLoader(test_set, batch_size=args.batch_size // num_workers, sampler=test_sampler)  # [3]

    checkpoint = ray.train.get_checkpoint()  # [7]
    first_epoch = restore(model, optimizer, checkpoint) if checkpoint is not None else 0  # [7]
    record = Record(args.output, resumed=first_epoch > 0) if rank == 0 else None  # [5]
    for epoch in range(first_epoch, args.epochs):
        if epoch == args.kill_at and checkpoint is None and rank == num_workers - 1:
            time.sleep(5)  # Ray looks for new checkpoints every 2 s: who dies sooner takes the last one along
            os.kill(os.getpid(), signal.SIGKILL)  # --kill-at: see for yourself that the run goes on
        sampler.set_epoch(epoch)  # [3]
        total = torch.zeros(2, dtype=torch.float64, device=device)  # loss, samples
        for images, labels in train_loader:
            images, labels = images.to(device), labels.to(device)
            loss = F.cross_entropy(model(task.normalise(images)), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total += torch.stack([loss.detach() * len(labels), torch.tensor(len(labels), device=device)])
        dist.all_reduce(total)  # [5]
        train_loss = (total[0] / total[1]).item()
        test_loss, accuracy = evaluate(model, task, test_loader, device)
        if record is not None:  # [5]
            record.epoch(epoch, train_loss, test_loss, accuracy)
        metrics = {"epoch": epoch, "train_loss": train_loss, "test_loss": test_loss, "accuracy": accuracy}  # [6]
        save(model, optimizer, metrics)  # [6]


def shard(model: nn.Module, device: torch.device) -> nn.Module:  # [4]
    """Block by block: forward and backward then gather one block at a time, and never the whole model."""
    from torch.distributed.fsdp import FullyShardedDataParallel  # [4]
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy  # [4]

    if dist.get_world_size() == 1:  # FSDP would wrap it, warn, and shard nothing  # [4]
        return model.to(device)  # [4]
    blocks = ModuleWrapPolicy({Block, BasicBlock})  # [4]
    return FullyShardedDataParallel(model, auto_wrap_policy=blocks, device_id=device, use_orig_params=True)  # [4]


def save(model: nn.Module, optimizer: torch.optim.Optimizer, metrics: dict[str, Any]) -> None:  # [6]
    """Gathers the whole model and optimizer in rank 0's host memory, for one file that any PyTorch can read."""
    import ray.train  # [6]
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict  # [6]

    on_gpu = dist.get_backend() == "nccl"  # on a CPU, offloading to the CPU crashes torch 2.13  # [6]
    whole = StateDictOptions(full_state_dict=True, cpu_offload=on_gpu)  # [6]
    state, optim = get_state_dict(model, optimizer, options=whole)  # every worker takes part  # [6]
    with tempfile.TemporaryDirectory() as folder:  # [6]
        if dist.get_rank() == 0:  # [6]
            content = {"model": state, "optim": optim, "epoch": metrics["epoch"] + 1}  # the one to train next  # [6]
            torch.save(content, Path(folder) / "checkpoint.pt")  # [6]
        ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(folder))  # [6]


def restore(model: nn.Module, optimizer: torch.optim.Optimizer, checkpoint: Any) -> int:  # [7]
    """Every worker takes its shards out of the file; returns the epoch to go on with."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict  # [7]

    with checkpoint.as_directory() as folder:  # [7]
        content = torch.load(Path(folder) / "checkpoint.pt", map_location="cpu", mmap=True)  # [7]
        set_state_dict(  # [7]
            model,  # [7]
            optimizer,  # [7]
            model_state_dict=content["model"],  # [7]
            optim_state_dict=content["optim"],  # [7]
            options=StateDictOptions(full_state_dict=True),  # [7]
        )  # [7]
    return content["epoch"]  # [7]


@torch.no_grad()
def evaluate(model: nn.Module, task: Task, loader: DataLoader[Any], device: torch.device) -> tuple[float, float]:
    """Loss and accuracy over the whole test set.

    A forward of a sharded model is made by all workers together, so each needs as many batches as the others:
    the sampler gives some samples twice for that, which are not counted.
    """
    for buffer in model.buffers():  # each worker's batch norm has seen its own samples: take rank 0's  # [5]
        dist.broadcast(buffer, src=0)  # [5]
    model.eval()
    position, num_workers = dist.get_rank(), dist.get_world_size()  # [5]
    total = torch.zeros(3, dtype=torch.float64, device=device)  # loss, right answers, samples
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        logits = model(task.normalise(images))
        places = position + num_workers * torch.arange(len(labels), device=device)  # [5]
        counted = places < len(loader.dataset)  # [5]
        position += num_workers * len(labels)  # [5]
        losses = F.cross_entropy(logits, labels, reduction="none")
        right = logits.argmax(1) == labels
        total += torch.stack([losses[counted].sum(), right[counted].sum(), counted.sum()])
    dist.all_reduce(total)  # [5]
    model.train()
    loss, right, samples = total.tolist()
    return loss / samples, right / samples


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    made = arguments.parser(__doc__)
    cluster.add_arguments(made)  # [1]
    made.add_argument("--name", help="the same name again goes on where that run was (default: a new one)")  # [7]
    made.add_argument("--max-failures", type=int, default=2, help="how often workers are started again")  # [7]
    made.add_argument("--kill-at", type=int, metavar="EPOCH", help="kill -9 the last worker as this epoch begins, once")
    args = arguments.parse(made, argv)
    if args.batch_size % max(args.num_workers, 1):  # [3]
        made.error(f"--batch-size {args.batch_size} does not divide over {args.num_workers} workers")  # [3]
    if args.kill_at is not None and args.kill_at < 1:
        made.error(f"--kill-at {args.kill_at} comes before the first checkpoint: nothing to go on from")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    scaling = cluster.connect(args.num_workers, args.use_gpu, args.cpus_per_worker, args.address)  # [1]
    from ray.train import FailureConfig, RunConfig  # [1]
    from ray.train.torch import TorchConfig, TorchTrainer  # [1]

    print(arguments.describe(args, args.num_workers))
    trainer = TorchTrainer(  # [1]
        train,  # [1]
        train_loop_config=vars(args),  # [1]
        torch_config=TorchConfig(backend="nccl" if args.use_gpu else "gloo"),  # [1]
        scaling_config=scaling,  # [1]
        run_config=RunConfig(  # [1]
            name=args.name or time.strftime("fsdp_%Y%m%d_%H%M%S"),  # [7]
            storage_path=args.output,  # [6]
            failure_config=FailureConfig(max_failures=args.max_failures),  # [7]
        ),  # [1]
    )  # [1]
    result = trainer.fit()  # [1]
    print(f"newest checkpoint: {result.checkpoint.path}")


if __name__ == "__main__":
    main()
