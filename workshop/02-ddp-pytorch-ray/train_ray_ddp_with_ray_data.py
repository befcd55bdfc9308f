"""The training of lesson 01 on Ray Train, its images read by Ray Data on the cluster's CPUs.

    python train_ray_ddp_with_ray_data.py --num-workers 2 --epochs 3
    python train_ray_ddp_with_ray_data.py --num-workers 2 --epochs 3 --order file      # no shuffling

Which worker gets which rows: Ray deals out blocks to whoever has fewest rows, as they get ready; with `preserve_order`,
set here, in the order of the data set. A block is a worker's share of a batch (where batches divide the data set), so
that in file order batch k is rows [k*B, (k+1)*B). Shuffled, each worker mixes its own rows within a buffer. Rows that
would make the workers' shares unequal are left out. --ids notes the rows of each batch.

What a single process does not need is marked with the number of its step:
    [1] connect and ask for workers        [4] divide the data         [7] save, and report what all have seen
    [2] hand the settings to the workers   [5] shuffle anew            [8] go on from what was saved
    [3] wrap the model                     [6] add up                  [9] say where, and how often to try again
"""

from __future__ import annotations

import json
import sys
import tempfile  # [7]
import time
from argparse import Namespace
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist  # [6]
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).absolute().parents[1]))  # the lessons share models and data
from common import cluster
from common.arguments import describe, parse, parser
from common.ray_images import images
from common.record import Record
from common.tasks import TASKS, Task


@torch.no_grad()
def evaluate(model: nn.Module, task: Task, test: Iterable[dict[str, Tensor]], device: torch.device) -> Tensor:
    """Sums over these batches: loss, correct, images."""
    model.eval()
    sums = torch.zeros(3, device=device)
    for batch in test:
        logits = model(task.normalise(batch["image"]))
        loss = F.cross_entropy(logits, batch["label"], reduction="sum")
        correct = (logits.argmax(1) == batch["label"]).sum()
        sums += torch.stack([loss, correct, torch.tensor(len(logits), device=device)])
    model.train()
    return sums


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
    train, test = ray.train.get_dataset_shard("train"), ray.train.get_dataset_shard("test")  # [4]
    share = args.batch_size // world_size  # [4]

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
        shuffle = {}  # [5]
        if args.order == "shuffled":  # [5]
            # The seed must differ from epoch to epoch, or each has the same order.
            shuffle = {"local_shuffle_buffer_size": 8 * share, "local_shuffle_seed": args.seed + epoch}  # [5]
        seen = torch.zeros(2, device=device)  # [6]
        for batch in train.iter_torch_batches(batch_size=share, **shuffle):  # [4]
            labels = batch["label"]
            loss = F.cross_entropy(model(task.normalise(batch["image"])), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen += torch.stack([loss.detach() * len(labels), torch.tensor(float(len(labels)), device=device)])  # [6]
            if args.ids:
                with Path(args.output, f"ids_rank_{rank}.jsonl").open("a") as file:
                    file.write(json.dumps(batch["id"].tolist()) + "\n")
        for buffer in plain_model.buffers():  # [3]
            dist.broadcast(buffer, 0)  # [3]
        # An equal split leaves rows out until all have as many. So everybody reads the test set, and takes each
        # world_size-th batch of it.
        batches = enumerate(test.iter_torch_batches(batch_size=share))  # [4]
        mine = (batch for number, batch in batches if number % world_size == rank)  # [4]
        sums = torch.cat([seen, evaluate(plain_model, task, mine, device)])  # [6]
        dist.all_reduce(sums)  # report() passes on what rank 0 says, and adds up nothing  # [6]
        train_loss, trained, test_loss, correct, tested = sums.tolist()  # [6]
        metrics = {"epoch": epoch, "train_loss": train_loss / trained,
                   "test_loss": test_loss / tested, "accuracy": correct / tested}  # fmt: skip
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
    scaling = cluster.connect(args.num_workers, args.use_gpu, args.cpus_per_worker, args.address, data_cpus=1)  # [1]
    from ray.data import ExecutionOptions  # [4]
    from ray.train import CheckpointConfig, DataConfig, FailureConfig, RunConfig  # [9]
    from ray.train.torch import TorchTrainer  # [1]

    share = args.batch_size // args.num_workers  # [4]
    datasets = {split: images(args.task, split, args.data, args.limit, share) for split in ("train", "test")}
    in_order = ExecutionOptions(preserve_order=True)  # [4]
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
        datasets=datasets,  # [4]
        dataset_config=DataConfig(datasets_to_split=["train"], execution_options=in_order),  # [4]
    )  # [1]
    return trainer.fit()  # [1]


def main() -> None:
    made = parser(__doc__)
    cluster.add_arguments(made)  # [1]
    made.set_defaults(cpus_per_worker=0.5)  # the rest is for those who read the images  # [1]
    made.add_argument("--name", default=f"ray-{time.strftime('%Y%m%d-%H%M%S')}", help="of the run")  # [9]
    made.add_argument("--max-failures", type=int, default=3, help="failures forgiven (default: %(default)s)")  # [9]
    made.add_argument("--order", choices=("shuffled", "file"), default="shuffled")
    made.add_argument("--ids", action="store_true", help="note the rows of every batch in OUTPUT/ids_rank_N.jsonl")
    args = parse(made)
    if args.num_workers > 0 and args.batch_size % args.num_workers:  # [4]
        made.error(f"--batch-size {args.batch_size} does not divide between {args.num_workers} workers")  # [4]
    print(describe(args, args.num_workers))
    result = fit(args)  # [1]
    print(f"last: {result.metrics}\ncheckpoint: {result.checkpoint.path}")  # [7]


if __name__ == "__main__":
    main()
