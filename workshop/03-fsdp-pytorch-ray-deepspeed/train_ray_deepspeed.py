"""Trains with DeepSpeed's ZeRO on Ray Train: optimizer state (1), gradients (2) and weights (3) divided.

    python train_ray_deepspeed.py --num-workers 2 --zero-stage 3 --epochs 3 [--use-gpu False]

The lines that exist only because training is distributed, and may fail, end with the number of their step:
[1] workers: what Ray starts, and how often it starts it again   [2] place: rank, number of workers, device
[3] data: each worker's part of every batch, another order each epoch   [4] DeepSpeed's engine
[5] numbers of all workers in one   [6] checkpoints in shards   [7] going on from one
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import sys
import tempfile  # [6]
import time
import warnings
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
from common.tasks import TASKS, Task

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


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

    torch.manual_seed(args.seed)
    model = task.model(args.small)
    engine = initialize(model, task.make_optimizer(model, args.lr), args)  # [4]
    dtype = DTYPES[args.precision]
    train_set, test_set = task.datasets(args.data, args.limit)
    sampler = DistributedSampler(train_set, shuffle=True, seed=args.seed)  # [3]
    train_loader = DataLoader(train_set, batch_size=args.batch_size // num_workers, sampler=sampler)  # [3]
    test_sampler = DistributedSampler(test_set, shuffle=False)  # [3]
    test_loader = DataLoader(test_set, batch_size=args.batch_size // num_workers, sampler=test_sampler)  # [3]

    checkpoint = ray.train.get_checkpoint()  # [7]
    first_epoch = restore(engine, checkpoint) if checkpoint is not None else 0  # [7]
    record = Record(args.output, resumed=first_epoch > 0) if rank == 0 else None  # [5]
    for epoch in range(first_epoch, args.epochs):
        if epoch == args.kill_at and checkpoint is None and rank == num_workers - 1:
            time.sleep(5)  # Ray looks for new checkpoints every 2 s: who dies sooner takes the last one along
            os.kill(os.getpid(), signal.SIGKILL)  # --kill-at: see for yourself that the run goes on
        sampler.set_epoch(epoch)  # [3]
        total = torch.zeros(2, dtype=torch.float64, device=device)  # loss, samples
        for images, labels in train_loader:
            images, labels = images.to(device), labels.to(device)
            loss = F.cross_entropy(engine(task.normalise(images).to(dtype)).float(), labels)
            engine.backward(loss)  # scales the loss under fp16  # [4]
            engine.step()  # clips, updates, and clears the gradients  # [4]
            total += torch.stack([loss.detach() * len(labels), torch.tensor(len(labels), device=device)])
        dist.all_reduce(total)  # [5]
        train_loss = (total[0] / total[1]).item()
        test_loss, accuracy = evaluate(engine, task, test_loader, device, dtype)
        if record is not None:  # [5]
            record.epoch(epoch, train_loss, test_loss, accuracy)
        metrics = {"epoch": epoch, "train_loss": train_loss, "test_loss": test_loss, "accuracy": accuracy}  # [6]
        save(engine, metrics)  # [6]


def initialize(model: nn.Module, optimizer: torch.optim.Optimizer, args: argparse.Namespace) -> Any:  # [4]
    """DeepSpeed's engine: takes over the model and the optimizer, and divides what its stage divides."""
    os.environ["DS_ACCELERATOR"] = "cuda" if args.use_gpu else "cpu"  # before it looks for itself  # [4]
    import deepspeed  # [4]

    deepspeed.utils.logger.setLevel("WARNING")  # [4]
    warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)  # names that it uses at every step  # [4]
    config = {  # [4]
        "train_micro_batch_size_per_gpu": args.batch_size // dist.get_world_size(),  # [4]
        "gradient_clipping": args.clip,  # [4]
        "zero_allow_untested_optimizer": True,  # torch's own, so that all versions of the lesson train alike  # [4]
        "bf16": {"enabled": args.precision == "bf16"},  # [4]
        "fp16": {"enabled": args.precision == "fp16"},  # [4]
        "zero_optimization": {  # [4]
            "stage": args.zero_stage,  # [4]
            # Numbers sent at a time: its own 5e8 would be a buffer larger than all that is divided of a small model.
            "reduce_bucket_size": args.bucket_size,  # [4]
            "allgather_bucket_size": args.bucket_size,  # [4]
            "stage3_prefetch_bucket_size": args.bucket_size,  # [4]
            "stage3_max_live_parameters": 2 * args.bucket_size,  # [4]
            "stage3_max_reuse_distance": args.bucket_size,  # its own 1e9 keeps what is used again soon: all  # [4]
            "overlap_comm": args.use_gpu,  # a CPU has no streams to overlap on  # [4]
        },  # [4]
    }  # [4]
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)  # [4]
    return engine  # [4]


def save(engine: Any, metrics: dict[str, Any]) -> None:  # [6]
    """Each worker writes its own part; Ray puts them together in the storage."""
    import ray.train  # [6]

    epoch = metrics["epoch"] + 1  # the one to train next  # [6]
    with tempfile.TemporaryDirectory() as folder:  # [6]
        engine.save_checkpoint(folder, tag=f"epoch_{epoch}", client_state={"epoch": epoch})  # [6]
        ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(folder))  # [6]


def restore(engine: Any, checkpoint: Any) -> int:  # [7]
    """The epoch to go on with. As many workers are needed as have saved: each reads the file of its own part."""
    with checkpoint.as_directory() as folder:  # [7]
        path, client_state = engine.load_checkpoint(folder, tag=newest_tag(folder))  # [7]
    if path is None:  # DeepSpeed warns, and would train on from random weights  # [7]
        raise RuntimeError(f"DeepSpeed could not load {checkpoint.path}")  # [7]
    return client_state["epoch"]  # [7]


def newest_tag(folder: str) -> str:  # [7]
    """By number: as text, epoch_9 would come after epoch_10."""
    tags = {int(path.name.removeprefix("epoch_")): path.name for path in Path(folder).glob("epoch_*")}  # [7]
    return tags[max(tags)]  # [7]


@torch.no_grad()
def evaluate(
    engine: Any, task: Task, loader: DataLoader[Any], device: torch.device, dtype: torch.dtype
) -> tuple[float, float]:
    """Loss and accuracy over the whole test set.

    Under ZeRO-3 a forward is made by all workers together, so each needs as many batches as the others:
    the sampler gives some samples twice for that, which are not counted.
    """
    for buffer in engine.module.buffers():  # each worker's batch norm has seen its own samples: take rank 0's  # [5]
        dist.broadcast(buffer, src=0)  # [5]
    engine.eval()
    position, num_workers = dist.get_rank(), dist.get_world_size()  # [5]
    total = torch.zeros(3, dtype=torch.float64, device=device)  # loss, right answers, samples
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        logits = engine(task.normalise(images).to(dtype)).float()
        places = position + num_workers * torch.arange(len(labels), device=device)  # [5]
        counted = places < len(loader.dataset)  # [5]
        position += num_workers * len(labels)  # [5]
        losses = F.cross_entropy(logits, labels, reduction="none")
        right = logits.argmax(1) == labels
        total += torch.stack([losses[counted].sum(), right[counted].sum(), counted.sum()])
    dist.all_reduce(total)  # [5]
    engine.train()
    loss, right, samples = total.tolist()
    return loss / samples, right / samples


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    made = arguments.parser(__doc__)
    cluster.add_arguments(made)  # [1]
    made.add_argument("--zero-stage", type=int, choices=[1, 2, 3], default=2, help="how much is divided (default: 2)")
    made.add_argument("--precision", choices=DTYPES, default="fp32", help="16-bit weights, with fp32 copies of a part")
    made.add_argument("--clip", type=float, default=1.0, help="largest norm of the gradient; 0: not clipped")
    made.add_argument("--bucket-size", type=int, default=8_000_000, help="numbers that workers exchange at a time")
    made.add_argument("--name", help="the same name again goes on where that run was (default: a new one)")  # [7]
    made.add_argument("--max-failures", type=int, default=2, help="how often workers are started again")  # [7]
    made.add_argument("--kill-at", type=int, metavar="EPOCH", help="kill -9 the last worker as this epoch begins, once")
    args = arguments.parse(made, argv)
    if args.batch_size % max(args.num_workers, 1):  # [3]
        made.error(f"--batch-size {args.batch_size} does not divide over {args.num_workers} workers")  # [3]
    if args.precision == "fp16" and not args.use_gpu:
        made.error("--precision fp16 needs a GPU: give fp32 or bf16")
    if args.kill_at is not None and args.kill_at < 1:
        made.error(f"--kill-at {args.kill_at} comes before the first checkpoint: nothing to go on from")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    if importlib.util.find_spec("deepspeed") is None:
        sys.exit("DeepSpeed is not installed: pip install --no-build-isolation deepspeed (after torch)")
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
            name=args.name or time.strftime("deepspeed_%Y%m%d_%H%M%S"),  # [7]
            storage_path=args.output,  # [6]
            failure_config=FailureConfig(max_failures=args.max_failures),  # [7]
        ),  # [1]
    )  # [1]
    result = trainer.fit()  # [1]
    print(f"newest checkpoint: {result.checkpoint.path}")


if __name__ == "__main__":
    main()
