"""The lessons' command lines: the same flags everywhere, and sizes that suit the machine."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from common.tasks import TASKS

CPU_LIMIT = 2048
"""Images where there is no GPU: an epoch in seconds instead of hours."""


def parser(description: str | None, task: str = "vit") -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--task", choices=TASKS, default=task, help="what to train (default: %(default)s)")
    made.add_argument("--epochs", type=int, default=3)
    made.add_argument("--batch-size", type=int, help="of all workers together (default: the task's)")
    made.add_argument("--lr", type=float, help="default: the task's")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--use-gpu", type=_truth, metavar="True|False", help="default: where there is one")
    made.add_argument("--full", action="store_true", help="the whole model and data set on a CPU, too")
    made.add_argument("--limit", type=int, help="the first LIMIT training and test images only")
    made.add_argument("--data", help="folder of the data; otherwise $KEEPSTEP_DATA, the cache or a download")
    made.add_argument("--output", default="output", help="folder for metrics and checkpoints (default: %(default)s)")
    return made


def parse(made: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses, and settles what depends on the machine: `use_gpu`, `small`, `limit`, `batch_size`."""
    args = made.parse_args(argv)
    for name in ("epochs", "batch_size", "limit"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            made.error(f"--{name.replace('_', '-')} is {getattr(args, name)}; at least 1 is needed")
    has_gpu = torch.cuda.is_available()
    if args.use_gpu and not has_gpu and not getattr(args, "address", None):
        made.error(
            "--use-gpu True, but torch sees no GPU here: leave it out or say --use-gpu False to train on the CPU"
        )
    args.use_gpu = has_gpu if args.use_gpu is None else args.use_gpu
    args.small = not args.use_gpu and not args.full
    if args.small and args.limit is None:
        args.limit = CPU_LIMIT
    args.batch_size = args.batch_size or (TASKS[args.task].batch_size if not args.small else 128)
    if getattr(args, "pace", 0) is None:
        args.pace = 0.2 if args.small else 0.0
    args.output = str(Path(args.output).resolve())
    return args


def add_pace(made: argparse.ArgumentParser) -> None:
    """For lessons in which workers are killed between checkpoints: they need steps that take their time."""
    made.add_argument(
        "--pace", type=float, help="seconds to wait in each step, as for a larger model (default: 0.2 on a CPU)"
    )


def describe(args: argparse.Namespace, num_workers: int) -> str:
    """A line to print first: what is about to be trained, and on what."""
    size = "small model, " if args.small else ""
    images = f"first {args.limit:,} images" if args.limit else "all images"
    device = "GPU" if args.use_gpu else "CPU"
    hint = "; --full for the whole" if args.small else ""
    return f"{TASKS[args.task].title}: {size}{images}, {num_workers} x {device}, batch {args.batch_size}{hint}"


def too_many(num_workers: int) -> str | None:
    """What to say of more workers than this machine has cores; None: they fit."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if num_workers <= cores:
        return None
    return f"{num_workers} workers share {cores} cores: right, but slower than {cores} workers would be"


def _truth(text: str) -> bool:
    if text.lower() in ("true", "yes", "1"):
        return True
    if text.lower() in ("false", "no", "0"):
        return False
    raise argparse.ArgumentTypeError(f"{text!r} is neither True nor False")
