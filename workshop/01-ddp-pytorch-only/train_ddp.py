"""The same training by hand on several processes, with nothing but PyTorch's DistributedDataParallel.

    torchrun --nproc_per_node=2 train_ddp.py --epochs 3      # torchrun starts the processes
    python train_ddp.py --world-size 2 --epochs 3            # mp.spawn does

What a single process does not need is marked with the number of its step; python -m common.count counts them:
    [1] start a process for each worker        [4] fetch the data once      [7] shuffle anew each epoch
    [2] meet the others, and take leave        [5] divide it                [8] add up what each has seen
    [3] a device and cores for each            [6] average the gradients    [9] let one print and save
"""

from __future__ import annotations

import argparse
import os
import socket  # [1]
import sys
from pathlib import Path

import torch
import torch.distributed as dist  # [2]
import torch.multiprocessing as mp  # [1]
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel  # [6]
from torch.utils.data import DataLoader, DistributedSampler, Subset  # [5]

sys.path.insert(0, str(Path(__file__).parents[1]))  # the lessons share models and data
from common.arguments import describe, parse, parser, too_many
from common.record import Record
from common.tasks import TASKS, Task


@torch.no_grad()
def evaluate(model: nn.Module, task: Task, test: DataLoader, device: torch.device) -> Tensor:
    """Sums over this worker's part of the test set: loss, correct."""
    model.eval()
    loss, correct = torch.zeros(2, device=device)
    for images, labels in test:
        images, labels = images.to(device), labels.to(device)
        logits = model(task.normalise(images))
        loss += F.cross_entropy(logits, labels, reduction="sum")
        correct += (logits.argmax(1) == labels).sum()
    model.train()
    return torch.stack([loss, correct])


def train_worker(args: argparse.Namespace) -> None:
    """One worker's life; RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say which and among whom."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])  # [2]
    local_rank = int(os.environ["LOCAL_RANK"])  # [3]
    device = torch.device("cuda", local_rank) if args.use_gpu else torch.device("cpu")  # [3]
    if args.use_gpu:  # [3]
        torch.cuda.set_device(device)  # [3]
    elif "OMP_NUM_THREADS" not in os.environ:  # [3]
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ["LOCAL_WORLD_SIZE"])))  # [3]
    dist.init_process_group("nccl" if args.use_gpu else "gloo", device_id=device if args.use_gpu else None)  # [2]
    if rank == 0:  # [9]
        print(describe(args, world_size))

    task = TASKS[args.task]
    torch.manual_seed(args.seed)
    model = task.model(args.small).to(device)
    model = DistributedDataParallel(model, device_ids=[local_rank] if args.use_gpu else None)  # [6]
    optimizer = task.make_optimizer(model, args.lr)
    if local_rank != 0:  # [4]
        dist.barrier()  # [4]
    train_set, test_set = task.datasets(args.data, args.limit)
    if local_rank == 0:  # [4]
        dist.barrier()  # [4]
    sampler = DistributedSampler(train_set, seed=args.seed)  # [5]
    train = DataLoader(train_set, args.batch_size // world_size, sampler=sampler)  # [5]
    # A DistributedSampler would repeat samples until all workers have as many; a test set must count each once.
    test = DataLoader(Subset(test_set, range(rank, len(test_set), world_size)), args.batch_size // world_size)  # [5]
    if rank == 0:  # [9]
        record = Record(args.output)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)  # [7]
        seen = torch.zeros(2, device=device)  # [8]
        for images, labels in train:
            images, labels = images.to(device), labels.to(device)
            loss = F.cross_entropy(model(task.normalise(images)), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen += torch.stack([loss.detach() * len(labels), torch.tensor(float(len(labels)), device=device)])  # [8]
        # Workers may have different numbers of test batches, and DDP's forward waits for all: use the model within,
        # and give everybody rank 0's batch norm statistics first.
        for buffer in model.module.buffers():  # [6]
            dist.broadcast(buffer, 0)  # [6]
        sums = torch.cat([seen, evaluate(model.module, task, test, device)])  # [8]
        dist.all_reduce(sums)  # [8]
        train_loss, trained, test_loss, correct = sums.tolist()  # [8]
        if rank == 0:  # [9]
            record.epoch(epoch, train_loss / trained, test_loss / len(test_set), correct / len(test_set))
    if rank == 0:  # [9]
        torch.save(model.module.state_dict(), Path(args.output) / "model.pt")
    dist.destroy_process_group()  # [2]
    # A thread of gloo's may still hold a tensor while Python is taken down, and then aborts the process: a worker that
    # has done its work would be reported as failed. So it leaves at once.
    sys.stdout.flush()  # [2]
    os._exit(0)  # [2]


def spawned_worker(rank: int, args: argparse.Namespace) -> None:  # [1]
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}  # [1]
    train_worker(args)  # [1]


def free_port(wanted: int) -> int:  # [1]
    with socket.socket() as probe:  # [1]
        try:  # [1]
            probe.bind(("127.0.0.1", wanted))  # [1]
        except OSError as error:  # [1]
            sys.exit(f"port {wanted} cannot be used ({error}): give another --master-port, or 0 for any")  # [1]
        return probe.getsockname()[1]  # [1]


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--world-size", type=int, help="workers to start, without torchrun (default: GPUs, or 2)")  # [1]
    made.add_argument("--master-port", type=int, default=29500, help="where they meet; 0: any free port")  # [2]
    args = parse(made)
    by_torchrun = "RANK" in os.environ  # [1]
    if by_torchrun and args.world_size:  # [1]
        made.error(f"--world-size is not for torchrun, which has started {os.environ['WORLD_SIZE']} workers")  # [1]
    gpus = torch.cuda.device_count() if args.use_gpu else 0  # [3]
    world_size = int(os.environ["WORLD_SIZE"]) if by_torchrun else args.world_size or gpus or 2  # [1]
    local_world_size = int(os.environ["LOCAL_WORLD_SIZE"]) if by_torchrun else world_size  # [1]
    if local_world_size < 1 or (args.use_gpu and local_world_size > gpus):  # [3]
        made.error(f"{local_world_size} workers here, and {gpus} GPUs: give as many, or --use-gpu False")  # [3]
    if args.batch_size % world_size:  # [5]
        made.error(f"--batch-size {args.batch_size} does not divide between {world_size} workers")  # [5]
    if not args.use_gpu and os.environ.get("RANK", "0") == "0" and (warning := too_many(local_world_size)):  # [3]
        print(warning, file=sys.stderr)  # [3]
    if by_torchrun:  # [1]
        train_worker(args)  # [1]
    else:  # [1]
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port(args.master_port))}  # [2]
        os.environ |= where | {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}  # [1]
        mp.spawn(spawned_worker, (args,), nprocs=world_size)  # [1]


if __name__ == "__main__":
    main()
