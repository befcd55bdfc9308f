"""ZeRO with keepstep's sizes of what is gathered and reduced at a time, against DeepSpeed's: time and GPU memory."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from measure import RESULTS, Row, compare, print_table, write_json
from memory import THEIR_SIZES
from saving import SIZES, make
from saving import step as take_step

import keepstep

WARM_STEPS = 5
STRATEGIES = ("zero2", "zero3")


def train(arguments: argparse.Namespace) -> dict[str, float]:
    """Trains a few steps in this worker: seconds a step, and the most memory that tensors had."""
    run = keepstep.start(checkpoint_every="10h")
    model, optimizer, loader = run.prepare(*make(arguments.size, arguments.batch))
    seconds = []
    began = time.perf_counter()
    for tokens in run.steps(loader):
        take_step(model, optimizer, tokens)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
        if len(seconds) == WARM_STEPS:
            torch.cuda.reset_peak_memory_stats()
        if len(seconds) == WARM_STEPS + arguments.steps:
            break
        began = time.perf_counter()
    return {"step_s": statistics.median(seconds[WARM_STEPS:]), "peak": torch.cuda.max_memory_allocated()}


def measured(arguments: argparse.Namespace, strategy: str, their_sizes: bool) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="keepstep-bench-") as name:
        folder = Path(name)
        (folder / "deepspeed.json").write_text(json.dumps({"zero_optimization": THEIR_SIZES}))
        command = [sys.executable, "-m", "keepstep", "run", f"--strategy={strategy}", "--precision=bf16"]
        command += ["--max-failures=0", "--storage=runs"]
        command += ["--deepspeed-config=deepspeed.json"] if their_sizes else []
        command += [str(Path(__file__).resolve()), f"--worker={folder}", f"--size={arguments.size}"]
        command += [f"--batch={arguments.batch}", f"--steps={arguments.steps}"]
        subprocess.run(command, cwd=folder, capture_output=True, timeout=300, check=False)
        found: dict[str, float] = json.loads((folder / "found.json").read_text())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="1B")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", help="write JSON to this file in benchmarks/results/")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        (arguments.worker / "found.json").write_text(json.dumps(train(arguments)))
        os._exit(0)  # the run's end would save it, which is not what is measured here
    rows: list[Row] = []
    for strategy in STRATEGIES:
        pairs: list[tuple[float, float]] = []
        peaks: dict[bool, Any] = {}
        for _ in range(arguments.rounds):
            found = {theirs: measured(arguments, strategy, theirs) for theirs in (True, False)}
            pairs.append((found[True]["step_s"], found[False]["step_s"]))
            peaks = {theirs: one["peak"] for theirs, one in found.items()}
        row = compare(f"a step of {strategy}, bf16", ("DeepSpeed's sizes", "keepstep's sizes"), pairs, None)
        row.notes["peak, DeepSpeed's sizes"] = f"{peaks[True] / 1e9:.2f} GB"
        row.notes["peak, keepstep's sizes"] = f"{peaks[False] / 1e9:.2f} GB"
        rows.append(row)
    print_table(rows)
    if arguments.output:
        write_json(RESULTS / arguments.output, rows, {**vars(arguments), "output": None, "worker": None})


if __name__ == "__main__":
    main()
