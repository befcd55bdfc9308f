"""The ViT recipe on Ray under several strategies: calm, and with a worker killed: what it costs, what differs."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from measure import RESULTS, write_report

import keepstep
from keepstep.folder import RunFolder
from keepstep.show import total_ledger

RECIPE = Path(__file__).parents[1] / "recipes" / "vit_cifar10"
BATCH = 512


@dataclass(frozen=True)
class Found:
    strategy: str
    steps: int
    accuracy: float
    images_per_s: float
    """Of the time spent in steps, the first ones included."""
    start_s: float
    """Of the undisturbed run: from the command to the first step."""
    recovery_s: float
    """Of the killed run: from the death to the first step after."""
    killed_at: int
    differing_lines: int
    """Of the metrics, between the two runs."""


def train(arguments: list[str], metrics: str, mark: str | None, kill_at: int) -> None:
    """A worker: the recipe, and where there is a `mark` to leave, a death at about step `kill_at`."""
    sys.path.insert(0, str(RECIPE))
    from train import main

    if mark and not Path(mark).exists():
        threading.Thread(target=die, args=(Path(metrics), Path(mark), kill_at), daemon=True).start()
    main(arguments)


def die(metrics: Path, mark: Path, kill_at: int) -> None:
    while not metrics.exists() or f'"step": {kill_at},' not in metrics.read_text():
        time.sleep(0.05)
    mark.touch()
    os.kill(os.getpid(), signal.SIGKILL)


def measured(strategy: str, options: argparse.Namespace, storage: Path) -> Found:
    folders = {kind: RunFolder(storage, f"{strategy}-{kind}") for kind in ("calm", "killed")}
    arguments = ["--epochs", str(options.epochs), "--batch-size", str(BATCH), *options.arguments]
    steps_an_epoch = 0
    for kind, folder in folders.items():
        mark = str(storage / f"{strategy}-died") if kind == "killed" else None
        kill_at = steps_an_epoch * options.epochs // 2 + 7  # not where a checkpoint is
        keepstep.launch(
            lambda folder=folder, mark=mark, kill_at=kill_at: train(arguments, str(folder.metrics), mark, kill_at),
            engine="ray", strategy=strategy, workers=options.workers, precision=options.precision, deterministic=True,
            name=folder.name, storage=str(storage), checkpoint_every=str(options.every), device=options.device,
        )  # fmt: skip
        steps_an_epoch = folder.read_result()["step"] // options.epochs
    calm, killed = (folder.read_metrics() for folder in folders.values())
    ledgers = {kind: total_ledger(f.read_events(), f.read_result()).seconds for kind, f in folders.items()}
    if ledgers["killed"]["recovery"] == 0:
        raise SystemExit(f"{strategy}: nobody died, so nothing was shown")
    steps = folders["calm"].read_result()["step"]
    return Found(
        strategy=strategy,
        steps=steps,
        accuracy=folders["calm"].read_result()["metrics"]["accuracy"],
        images_per_s=steps * BATCH / ledgers["calm"]["step"],
        start_s=ledgers["calm"]["start"],
        recovery_s=ledgers["killed"]["recovery"],
        killed_at=steps_an_epoch * options.epochs // 2 + 7,
        differing_lines=sum(a != b for a, b in zip(calm, killed, strict=False)) + abs(len(calm) - len(killed)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategies", nargs="+", default=["ddp", "fsdp2", "zero3"])
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--storage", help="keep the runs in this folder")
    parser.add_argument("--output", help="write JSON to this file in benchmarks/results/")
    parser.add_argument("arguments", nargs="*", help="further arguments of the recipe, after --")
    options = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory(prefix="keepstep-bench-") as scratch:
        for strategy in options.strategies:
            found.append(measured(strategy, options, Path(options.storage or scratch)))
            if options.output:
                write_report(
                    RESULTS / options.output, [asdict(row) for row in found], {**vars(options), "output": None}
                )
    print(f"\n{'strategy':<10}{'images/s':>10}{'accuracy':>10}{'start':>9}{'killed at':>11}{'recovery':>10}  metrics")
    for row in found:
        same = "bitwise equal" if row.differing_lines == 0 else f"{row.differing_lines} lines DIFFER"
        print(
            f"{row.strategy:<10}{row.images_per_s:>10,.0f}{row.accuracy:>10.2%}{row.start_s:>7.1f} s"
            f"{row.killed_at:>11}{row.recovery_s:>8.1f} s  {same}"
        )
    raise SystemExit(any(row.differing_lines for row in found))


if __name__ == "__main__":
    main()
