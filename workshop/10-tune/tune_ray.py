"""Searches the best learning rate with raw Ray Tune: a grid, or ASHA, which stops bad trials early.

    python tune_ray.py --method grid --lrs 1e-4,1e-3,1e-2 --epochs 3
    python tune_ray.py --method asha --lrs 1e-5,1e-4,1e-3,1e-2,1e-1 --epochs 9
    python tune_ray.py --method asha --num-samples 8          # drawn between the smallest and the largest of --lrs
    python tune_ray.py --num-workers 2 --cpus-per-worker 0.5  # each trial is a distributed training

Lines that are there for the search end with the number of their step:
[1] the training reads its values from a config  [2] it reports and saves  [3] what to try  [4] whom to stop
[5] room for each trial  [6] the search itself, and its table
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the lessons share models and data

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import DataLoader, DistributedSampler, Subset

from common import arguments, cluster
from common.tasks import TASKS

WAITING = {"node:__internal_head__": 0.001}  # [5]
"""What a trial reserves that only waits for its workers: Tune wants something, and a core would be one too few."""


def train(config: dict[str, Any], report: Callable[..., None]) -> None:  # [1]
    """One trial, or one worker of a trial that has several."""
    args, lr = argparse.Namespace(**config["args"]), config["lr"]  # [1]
    task, distributed = TASKS[args.task], dist.is_initialized()
    rank, size = (dist.get_rank(), dist.get_world_size()) if distributed else (0, 1)
    device = _device(distributed, args.use_gpu)
    torch.manual_seed(args.seed)
    model = task.model(args.small).to(device)
    trained = torch.nn.parallel.DistributedDataParallel(model) if distributed else model
    optimizer = task.make_optimizer(trained, lr)
    train_set, test_set = task.datasets(args.data, args.limit)
    sampler = DistributedSampler(train_set, size, rank, seed=args.seed)
    batches = DataLoader(train_set, args.batch_size // size, sampler=sampler)
    own_part = Subset(
        test_set, range(rank, len(test_set), size)
    )  # each test image once, whatever the number of workers
    tests = DataLoader(own_part, args.batch_size)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        trained.train()
        seen = torch.zeros(4, device=device)  # training loss, images, test loss, right
        for images, labels in batches:
            images, labels = images.to(device), labels.to(device)
            loss = F.cross_entropy(trained(task.normalise(images)), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen[:2] += torch.stack([loss.detach() * len(labels), torch.tensor(len(labels), device=device)])
        model.eval()
        if distributed:  # batch norm's running means are each rank's own: judge the model that rank 0 saves
            for buffer in model.buffers():
                dist.broadcast(buffer, 0)
        with torch.no_grad():
            for images, labels in tests:
                images, labels = images.to(device), labels.to(device)
                logits = model(task.normalise(images))
                seen[2] += F.cross_entropy(logits, labels, reduction="sum")
                seen[3] += (logits.argmax(1) == labels).sum()
        if distributed:
            dist.all_reduce(seen)
        loss_sum, num_images, test_loss, right = seen.tolist()
        metrics = {"epoch": epoch, "step": (epoch + 1) * len(batches), "train_loss": loss_sum / num_images,
                   "test_loss": test_loss / len(test_set), "accuracy": right / len(test_set)}  # fmt: skip  # [2]
        with tempfile.TemporaryDirectory() as folder:  # [2]
            torch.save(model.state_dict(), Path(folder) / "model.pt")  # [2]
            report(metrics, folder if rank == 0 else None)  # [2]


def _device(distributed: bool, use_gpu: bool) -> torch.device:
    if distributed:
        from ray.train.torch import get_device

        device: torch.device = get_device()
        return device
    return torch.device("cuda" if use_gpu else "cpu")


def trial_here(config: dict[str, Any]) -> None:
    """A trial that is one process: the function that Tune runs is the training itself."""
    from ray import tune

    def report(metrics: dict[str, float], folder: str | None) -> None:  # [2]
        tune.report(metrics, checkpoint=tune.Checkpoint.from_directory(folder))  # [2]

    train(config, report)


def trial_of_workers(config: dict[str, Any]) -> None:
    """A trial of several workers: the function that Tune runs starts a Ray Train run and waits for it."""
    import ray.train
    from ray.train.torch import TorchTrainer
    from ray.tune.integration.ray_train import TuneReportCallback

    def worker(config: dict[str, Any]) -> None:
        def report(metrics: dict[str, float], folder: str | None) -> None:  # [2]
            ray.train.report(metrics, checkpoint=folder and ray.train.Checkpoint.from_directory(folder))  # [2]

        train(config, report)

    name = f"{config['args']['method']}-{config['lr']:g}"
    run_config = ray.train.RunConfig(name, config["trainings"], callbacks=[TuneReportCallback()])  # [2]
    TorchTrainer(worker, train_loop_config=config, scaling_config=config["scaling"], run_config=run_config).fit()


def search(args: argparse.Namespace) -> Any:
    """Runs every trial; returns Tune's results."""
    scaling = cluster.connect(args.num_workers, args.use_gpu, args.cpus_per_worker, args.address, quiet=True)
    import ray
    from ray import tune
    from ray.tune.schedulers import ASHAScheduler
    from ray.tune.search.basic_variant import BasicVariantGenerator

    folder = Path(args.output) / f"ray-{args.method}"
    shutil.rmtree(folder, ignore_errors=True)
    space = tune.loguniform(min(args.lrs), max(args.lrs)) if args.num_samples else tune.grid_search(args.lrs)  # [3]
    asha = ASHAScheduler("training_iteration", max_t=args.epochs, grace_period=1, reduction_factor=3)  # [4]
    # Workers of a distributed trial reserve their own room. Were all trials started at once, they would wait for each
    # other's halves; so no more are started than there is room for.
    alone = args.num_workers == 1  # [5]
    need = {"CPU": args.cpus_per_worker, "GPU": int(args.use_gpu)} if alone else WAITING  # [5]
    per_trial = scaling.total_resources  # [5]
    at_once = min(ray.cluster_resources()[kind] // per_trial[kind] for kind in per_trial if per_trial[kind])  # [5]
    config = {"args": vars(args), "lr": space, "scaling": scaling, "trainings": str(folder / "trainings")}  # [3]
    tuner = tune.Tuner(  # [6]
        tune.with_resources(trial_here if alone else trial_of_workers, need),  # [5]
        param_space=config,  # [3]
        tune_config=tune.TuneConfig(  # [6]
            metric="accuracy",  # [6]
            mode="max",  # [6]
            num_samples=args.num_samples or 1,  # [3]
            search_alg=BasicVariantGenerator(max_concurrent=int(at_once), random_state=args.seed),  # [5]
            scheduler=asha if args.method == "asha" else None,  # [4]
        ),  # [6]
        run_config=tune.RunConfig(name=folder.name, storage_path=args.output, verbose=0),  # [6]
    )  # [6]
    return tuner.fit()  # [6]


def summarise(args: argparse.Namespace, results: Any) -> dict[str, Any]:
    """What `keepstep tune` writes too: every trial with its reports, best first."""
    trials = []
    for result in results:
        frame = result.metrics_dataframe  # [6]
        accuracies = [] if frame is None else frame["accuracy"].tolist()
        early = result.error is None and len(accuracies) < args.epochs
        trials.append({"status": "failed" if result.error else "stopped early" if early else "finished",
                       "values": {"lr": result.config["lr"]}, "accuracy": accuracies[-1] if accuracies else None,
                       "step": int(frame["step"].iloc[-1]) if accuracies else 0, "reports": accuracies,
                       "checkpoint": _checkpoint(result)})  # fmt: skip
    trials.sort(key=lambda trial: -1.0 if trial["accuracy"] is None else trial["accuracy"], reverse=True)
    return {"search": {"method": args.method, "metric": "accuracy:max"}, "trials": trials}


def _checkpoint(result: Any) -> str | None:
    """Ray Train's workers hand their checkpoint over by its path, Tune's function as a checkpoint."""
    if result.checkpoint is not None:
        return str(result.checkpoint.path)
    return (result.metrics or {}).get("checkpoint_path")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    made = arguments.parser(__doc__, task="resnet")
    cluster.add_arguments(made)
    made.set_defaults(num_workers=1)
    made.add_argument("--method", choices=["grid", "asha"], default="grid", help="default: %(default)s")
    made.add_argument("--lrs", type=_rates, default="1e-4,1e-3,1e-2", help="rates to try (default: %(default)s)")
    made.add_argument("--num-samples", type=int, help="draw so many rates between the smallest and largest of --lrs")
    args = arguments.parse(made, argv)
    if args.num_samples is not None and (args.num_samples < 1 or len(set(args.lrs)) < 2):
        made.error("--num-samples draws 1 or more rates between the smallest and largest of --lrs: give two rates")
    if args.lr is not None:
        made.error("--lr is what is searched for: give --lrs")
    if args.batch_size % max(args.num_workers, 1):
        made.error(f"--batch-size {args.batch_size} does not divide over {args.num_workers} workers")
    return args


def _rates(text: str) -> list[float]:
    try:
        rates = [float(word) for word in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers, as 1e-4,1e-3,1e-2") from None
    if min(rates) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r}: a learning rate is above 0")
    return rates


def main() -> None:
    args = parse()
    print(arguments.describe(args, args.num_workers), flush=True)
    found = summarise(args, search(args))
    path = Path(args.output) / f"ray-{args.method}" / "tune.json"
    path.write_text(json.dumps(found, indent=1))
    for trial in found["trials"]:
        accuracies = " ".join(f"{accuracy:.2%}" for accuracy in trial["reports"])
        print(f"lr {trial['values']['lr']:<8g} step {trial['step']:>4}  {trial['status']:<13} {accuracies}")
    if any(trial["status"] == "failed" for trial in found["trials"]):
        sys.exit(f"trials failed; why is in error.txt below {path.parent}")
    best = found["trials"][0]
    weights = os.path.relpath(best["checkpoint"])
    print(f"best: lr {best['values']['lr']:g}, accuracy {best['accuracy']:.2%}, weights in {weights}")


if __name__ == "__main__":
    main()
