"""Trains with FSDP2 on Ray Train: every worker holds a shard of weights, gradients and optimizer state.

    python train_ray_fsdp2.py --num-workers 2 --epochs 3 [--cpu-offload --mixed-precision --no-reshard]

The lines that exist only because training is distributed, and may fail, end with the number of their step:
[1] workers: what Ray starts, and how often it starts it again   [2] place: rank, number of workers, device
[3] data: each worker's part of every batch, another order each epoch   [4] sharding the model
[5] numbers of all workers in one   [6] checkpoints in shards   [7] going on from one
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile  # [6]
import time
from collections.abc import Sequence
from contextlib import nullcontext
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
    model = shard(task.model(args.small).to(device), args, device)  # [4]
    optimizer = task.make_optimizer(model, args.lr)  # after sharding, so that its moments are shards, too
    train_set, test_set = task.datasets(args.data, args.limit)
    sampler = DistributedSampler(train_set, shuffle=True, seed=args.seed)  # [3]
    train_loader = DataLoader(train_set, batch_size=args.batch_size // num_workers, sampler=sampler)  # [3]
    test_sampler = DistributedSampler(test_set, shuffle=False)  # [3]
    test_loader = DataLoader(test_set, batch_size=args.batch_size // num_workers, sampler=test_sampler)  # [3]

    state = AppState(model, optimizer)  # [6]
    checkpoint = ray.train.get_checkpoint()  # [7]
    if checkpoint is not None:  # [7]
        restore(state, checkpoint)  # [7]
    record = Record(args.output, resumed=state.epoch > 0) if rank == 0 else None  # [5]
    with profiler(args.profile_dir, rank) as profile:
        for epoch in range(state.epoch, args.epochs):
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
                state.step += 1
                if profile is not None:
                    profile.step()
            dist.all_reduce(total)  # [5]
            train_loss = (total[0] / total[1]).item()
            test_loss, accuracy = evaluate(model, task, test_loader, device)
            if record is not None:  # [5]
                record.epoch(epoch, train_loss, test_loss, accuracy, step=state.step)
            state.epoch = epoch + 1  # the one to train next  # [6]
            if state.epoch % args.checkpoint_freq == 0 or state.epoch == args.epochs:  # [6]
                save(
                    state, {"epoch": epoch, "train_loss": train_loss, "test_loss": test_loss, "accuracy": accuracy}
                )  # [6]


def shard(model: nn.Module, args: argparse.Namespace, device: torch.device) -> nn.Module:  # [4]
    """Block by block: forward and backward then gather one block at a time, and never the whole model."""
    from torch.distributed.device_mesh import init_device_mesh  # [4]
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard  # [4]

    half = torch.bfloat16 if args.mixed_precision else None  # [4]
    wide = torch.float32 if args.mixed_precision else None  # gradients are summed, and logits come out, in fp32  # [4]
    pinned = device.type == "cuda"  # memory that a GPU can copy from at full speed; a CPU has no use for it  # [4]
    options = {  # [4]
        "mesh": init_device_mesh(device.type, (dist.get_world_size(),)),  # [4]
        "reshard_after_forward": not args.no_reshard,  # [4]
        "offload_policy": CPUOffloadPolicy(pin_memory=pinned) if args.cpu_offload else OffloadPolicy(),  # [4]
    }  # [4]
    for block in model.modules():  # [4]
        if isinstance(block, Block | BasicBlock):  # [4]
            fully_shard(block, mp_policy=MixedPrecisionPolicy(param_dtype=half, reduce_dtype=wide), **options)  # [4]
    whole = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=wide, output_dtype=wide)  # [4]
    return fully_shard(model, mp_policy=whole, **options)  # [4]


class AppState:  # [6]
    """What a checkpoint holds. DCP asks each worker for its shards, and gives each its shards back."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:  # [6]
        self.model, self.optimizer = model, optimizer  # [6]
        self.epoch = self.step = 0  # [6]

    def state_dict(self) -> dict[str, Any]:  # [6]
        from torch.distributed.checkpoint.state_dict import get_state_dict  # [6]

        model, optim = get_state_dict(self.model, self.optimizer)  # [6]
        return {"model": model, "optim": optim, "epoch": self.epoch, "step": self.step}  # [6]

    def load_state_dict(self, state: dict[str, Any]) -> None:  # [7]
        from torch.distributed.checkpoint.state_dict import set_state_dict  # [7]

        set_state_dict(  # [7]
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optim"],  # [7]
        )  # [7]
        self.epoch, self.step = state["epoch"], state["step"]  # [7]


def save(state: AppState, metrics: dict[str, Any]) -> None:  # [6]
    """Each worker writes its own shards; Ray puts them together in the storage."""
    import ray.train  # [6]
    import torch.distributed.checkpoint as dcp  # [6]

    with tempfile.TemporaryDirectory() as folder:  # [6]
        dcp.save({"app": state}, checkpoint_id=folder)  # [6]
        ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(folder))  # [6]


def restore(state: AppState, checkpoint: Any) -> None:  # [7]
    import torch.distributed.checkpoint as dcp  # [7]

    with checkpoint.as_directory() as folder:  # [7]
        dcp.load({"app": state}, checkpoint_id=folder)  # [7]


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


def profiler(folder: str | None, rank: int) -> Any:
    """Writes a trace of steps 2 to 4 for each worker, to be opened at ui.perfetto.dev; no folder: does nothing."""
    from torch.profiler import ProfilerActivity, profile, schedule

    if folder is None:
        return nullcontext()
    Path(folder).mkdir(parents=True, exist_ok=True)
    return profile(
        activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available(),
        schedule=schedule(wait=0, warmup=1, active=3, repeat=1),
        on_trace_ready=lambda made: made.export_chrome_trace(str(Path(folder) / f"rank_{rank}.json")),
        profile_memory=True,
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    made = arguments.parser(__doc__)
    cluster.add_arguments(made)  # [1]
    made.add_argument("--cpu-offload", action="store_true", help="keep shards in host memory between their uses")
    made.add_argument("--mixed-precision", action="store_true", help="compute in bf16; the shards stay fp32")
    made.add_argument("--no-reshard", action="store_true", help="keep a block gathered from forward to backward")
    made.add_argument("--checkpoint-freq", type=int, default=1, help="epochs between checkpoints; the last always is")
    made.add_argument("--profile-dir", help="write a trace of a few steps there, a file a worker")
    made.add_argument("--name", help="the same name again goes on where that run was (default: a new one)")  # [7]
    made.add_argument("--max-failures", type=int, default=2, help="how often workers are started again")  # [7]
    made.add_argument("--kill-at", type=int, metavar="EPOCH", help="kill -9 the last worker as this epoch begins, once")
    args = arguments.parse(made, argv)
    if args.batch_size % max(args.num_workers, 1):  # [3]
        made.error(f"--batch-size {args.batch_size} does not divide over {args.num_workers} workers")  # [3]
    if args.checkpoint_freq < 1:
        made.error(f"--checkpoint-freq is {args.checkpoint_freq}; at least 1 epoch is needed")
    if args.kill_at is not None and args.kill_at < args.checkpoint_freq:
        made.error(f"--kill-at {args.kill_at} comes before the first checkpoint: nothing to go on from")
    args.profile_dir = args.profile_dir and str(Path(args.profile_dir).resolve())
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
            name=args.name or time.strftime("fsdp2_%Y%m%d_%H%M%S"),  # [7]
            storage_path=args.output,  # [6]
            failure_config=FailureConfig(max_failures=args.max_failures),  # [7]
        ),  # [1]
    )  # [1]
    result = trainer.fit()  # [1]
    print(f"newest checkpoint: {result.checkpoint.path}")


if __name__ == "__main__":
    main()
