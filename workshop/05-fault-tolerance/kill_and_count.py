"""Kills workers of a training at random moments, and counts which samples the final weights have seen.

    python kill_and_count.py raw --kills 1 --seed 7 --epochs 2
    python kill_and_count.py keepstep --kills 1 --seed 7 --epochs 2

It runs twice: undisturbed, and with SIGKILL to a worker --kills times, whom and when drawn from --seed. Then it counts
sample ids, and compares losses and weights of both runs bit for bit.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # the lessons share models and data
from common import arguments, cluster, consumed, faults
from common.tasks import TASKS


@dataclass(frozen=True)
class Verdict:
    kills: list[faults.Killed]
    tally: consumed.Tally
    seconds: float
    same_losses: bool | None
    """As the undisturbed run's, bitwise, step by step; None: there was none to compare with."""
    weights_apart: float | None
    """The largest difference to the undisturbed run's; 0: bitwise the same."""


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    made = arguments.parser(__doc__)
    arguments.add_pace(made)
    made.add_argument("version", choices=["raw", "keepstep"])
    cluster.add_arguments(made)
    made.add_argument("--kills", type=int, default=1)
    made.add_argument("--checkpoint-every", type=int, default=5, help="steps; 0: at the end of each epoch, raw only")
    made.add_argument("--resume", choices=["again", "next", "skip"], default="again", help="raw: see its --help")
    made.add_argument("--engine", choices=["torchrun", "ray"], default="torchrun", help="keepstep's")
    made.add_argument("--order", choices=["keepstep", "torch"], default="keepstep", help="keepstep: see its --help")
    made.add_argument("--no-reference", action="store_true", help="count only: no undisturbed run to compare with")
    args = arguments.parse(made, argv)
    if args.kills < 0:
        made.error(f"--kills is {args.kills}; 0 or more are needed")
    if args.version == "keepstep" and not args.checkpoint_every:
        made.error("keepstep saves by steps: give --checkpoint-every 1 or more")
    return args


def command(args: argparse.Namespace, name: str) -> list[str]:
    """What a person would type, for the version that is asked for."""
    own = ["--task", args.task, "--epochs", args.epochs, "--batch-size", args.batch_size, "--seed", args.seed]
    own += ["--pace", args.pace, "--use-gpu", args.use_gpu, "--output", args.output]
    own += ["--full"] if args.full else []
    for flag in ("lr", "limit", "data"):
        own += [f"--{flag}", getattr(args, flag)] if getattr(args, flag) is not None else []
    forgiven = ["--max-failures", max(3, args.kills), "--checkpoint-every", args.checkpoint_every, "--name", name]
    on_ray = ["--cpus-per-worker", args.cpus_per_worker] + (["--address", args.address] if args.address else [])
    if args.version == "raw":
        words = [HERE / "train_ray_fault_tolerant.py", *own, *forgiven, *on_ray]
        words += ["--num-workers", args.num_workers, "--resume", args.resume]
    else:
        words = ["-m", "keepstep", "run", *forgiven, "--workers", args.num_workers, "--engine", args.engine]
        words += ["--storage", Path(args.output) / "runs", "--device", "cuda" if args.use_gpu else "cpu"]
        words += ["--deterministic"] if args.use_gpu else []  # many GPU kernels add up in another order each time
        words += on_ray if args.engine == "ray" else []
        words += [HERE / "train_keepstep.py", *own, "--order", args.order]
    return [sys.executable, *map(str, words)]


def disturb(args: argparse.Namespace) -> Verdict:
    """Both runs, and what comes of comparing them."""
    num_samples = len(TASKS[args.task].datasets(args.data, args.limit)[0])
    num_steps = args.epochs * -(-num_samples // args.batch_size)
    kills = faults.draw(args.kills, num_steps, args.num_workers, args.seed)
    kind = args.resume if args.version == "raw" else args.engine
    name = f"{args.version}-{kind}-every-{args.checkpoint_every}"
    if not args.no_reference:
        _run(args, f"{name}-undisturbed", [])
    began = time.perf_counter()
    killed = _run(args, f"{name}-killed", kills)
    seconds = time.perf_counter() - began

    folder = Path(args.output) / f"{name}-killed"
    tally = consumed.tally(folder, num_samples, args.epochs)
    same_losses = weights_apart = None
    if not args.no_reference:
        undisturbed = Path(args.output) / f"{name}-undisturbed"
        same_losses = _losses(folder) == _losses(undisturbed)
        weights_apart = apart(weights(args, f"{name}-killed"), weights(args, f"{name}-undisturbed"))
    verdict = Verdict(killed, tally, seconds, same_losses, weights_apart)
    (folder / "verdict.json").write_text(json.dumps(asdict(verdict), indent=1))
    return verdict


def _run(args: argparse.Namespace, name: str, kills: Sequence[faults.Kill]) -> list[faults.Killed]:
    for old in (Path(args.output) / name, Path(args.output) / "runs" / name):
        shutil.rmtree(old, ignore_errors=True)  # the same name would go on with it
    return faults.train(command(args, name), Path(args.output) / name, kills)


def _losses(folder: Path) -> dict[int, float]:
    return consumed.losses(consumed.history(consumed.attempts(folder)))


def weights(args: argparse.Namespace, name: str) -> dict[str, torch.Tensor]:
    output = Path(args.output)
    folder = output / name if args.version == "raw" else output / "runs" / name / "artifacts"
    return load_file(folder / "weights.safetensors")


def apart(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    """The largest difference between two states of a model; 0: bitwise the same."""
    return max(0.0 if torch.equal(first[name], second[name]) else (first[name] - second[name]).abs().max().item()
               for name in first)  # fmt: skip


def describe(verdict: Verdict) -> str:
    lines = [*map(str, verdict.kills), str(verdict.tally)]
    if verdict.same_losses is not None and verdict.weights_apart is not None:
        lines.append(f"losses bitwise those of the undisturbed run: {'yes' if verdict.same_losses else 'no'}")
        how = f"no, up to {verdict.weights_apart:.2g} apart" if verdict.weights_apart else "yes"
        lines.append(f"weights bitwise those of the undisturbed run: {how}")
    return "\n".join(lines)


def main() -> None:
    args = parse()
    print(arguments.describe(args, args.num_workers), flush=True)
    try:
        verdict = disturb(args)
    except (faults.TrainingFailed, ValueError) as error:
        sys.exit(str(error))
    print(describe(verdict))


if __name__ == "__main__":
    main()
