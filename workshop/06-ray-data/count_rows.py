"""Kills a worker of a training on Ray data, goes on, and counts which rows the final weights have seen.

    python count_rows.py raw --kills 1 --seed 3
    python count_rows.py keepstep --kills 1 --seed 3 --then-workers 1

--then-workers: the kill ends the training, and the same command goes on with that many workers. Without it, the
training restarts its workers by itself.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # the lessons share models and data
from common import arguments, cluster, consumed, faults


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    made = arguments.parser(__doc__, task="resnet")
    arguments.add_pace(made)
    made.add_argument("version", choices=["raw", "keepstep"])
    cluster.add_arguments(made)
    made.set_defaults(epochs=2, cpus_per_worker=0.5)
    made.add_argument("--images", help="folder of Parquet files (default: OUTPUT/images/TASK)")
    made.add_argument("--kills", type=int, default=1)
    made.add_argument("--then-workers", type=int, help="go on with as many (default: with the same, by itself)")
    made.add_argument("--checkpoint-every", type=int, default=5, help="steps")
    made.add_argument("--resume", choices=["again", "skip"], default="again", help="raw: an interrupted epoch")
    args = arguments.parse(made, argv)
    args.images = str(Path(args.images or f"{args.output}/images/{args.task}").resolve())
    if not any(Path(args.images).glob("*.parquet")):
        made.error(f"{args.images} has no Parquet files: python images_to_parquet.py writes them")
    if args.then_workers is not None and args.kills != 1:
        made.error(f"--then-workers goes with one kill, not with {args.kills}")
    return args


def command(args: argparse.Namespace, name: str, num_workers: int, max_failures: int) -> list[str]:
    """What a person would type, for the version that is asked for."""
    own = ["--task", args.task, "--epochs", args.epochs, "--batch-size", args.batch_size, "--seed", args.seed]
    own += ["--pace", args.pace, "--use-gpu", args.use_gpu, "--output", args.output, "--images", args.images]
    own += ["--full"] if args.full else []
    for flag in ("lr", "limit", "data"):
        own += [f"--{flag}", getattr(args, flag)] if getattr(args, flag) is not None else []
    both = ["--max-failures", max_failures, "--checkpoint-every", args.checkpoint_every, "--name", name]
    on_ray = ["--address", args.address] if args.address else []
    if args.version == "raw":
        words = [HERE / "train_ray_data.py", *own, *both, *on_ray, "--num-workers", num_workers]
        words += ["--cpus-per-worker", args.cpus_per_worker, "--resume", args.resume]
    else:
        words = ["-m", "keepstep", "run", *both, "--workers", num_workers, "--engine", "torchrun"]
        words += ["--storage", Path(args.output) / "runs", "--device", "cuda" if args.use_gpu else "cpu"]
        words += [HERE / "train_keepstep.py", *own]
    return [sys.executable, *map(str, words)]


def disturb(args: argparse.Namespace) -> tuple[list[faults.Killed], consumed.Tally]:
    import pyarrow.dataset

    num_rows = pyarrow.dataset.dataset(args.images).count_rows()
    num_steps = args.epochs * -(-num_rows // args.batch_size)
    kills = faults.draw(args.kills, num_steps, args.num_workers, args.seed)
    kind = f"raw-{args.resume}" if args.version == "raw" else "keepstep"
    name = f"{kind}-then-{args.then_workers or 'same'}"
    folder = Path(args.output) / name
    for old in (folder, Path(args.output) / "runs" / name):
        shutil.rmtree(old, ignore_errors=True)  # the same name would go on with it
    if args.then_workers is None:
        killed = faults.train(command(args, name, args.num_workers, max(3, args.kills)), folder, kills)
    else:
        killed = faults.train(command(args, name, args.num_workers, 0), folder, kills, dies=True)
        faults.train(command(args, name, args.then_workers, 0), folder)
        killed = faults.recovered(killed, folder)
    return killed, consumed.tally(folder, num_rows, args.epochs)


def main() -> None:
    args = parse()
    print(arguments.describe(args, args.num_workers), flush=True)
    try:
        killed, tally = disturb(args)
    except (faults.TrainingFailed, ValueError) as error:
        sys.exit(str(error))
    for kill in killed:
        print(kill)
    print(tally)


if __name__ == "__main__":
    main()
