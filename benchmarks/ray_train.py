"""Starting and recovering on a Ray cluster: bare Ray Train, as its guide has it, and keepstep, taking turns."""

from __future__ import annotations

import argparse
import json
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import ray
import torch
import torch.nn.functional as F
from measure import RESULTS, Row, compare, print_table, write_json
from ray.train import Checkpoint, CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model
from small_loop import EVERY, WORKERS, make, note
from torch.utils.data import DataLoader

import keepstep

STEPS, DIES_AT = 40, 22


def die_once(folder: str, step: int, rank: int) -> None:
    mark = Path(folder) / "died"
    if step == DIES_AT and rank == WORKERS - 1 and not mark.exists():
        mark.write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)


def bare(config: dict[str, Any]) -> None:
    """Ray Train's training function, with the checkpoints that its guide asks the user to write."""
    folder, steps, context = config["folder"], config["steps"], ray.train.get_context()
    model, optimizer, loader = make(steps)
    model = prepare_model(model)
    loader = prepare_data_loader(DataLoader(loader.dataset, 64 // WORKERS))
    first = 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as saved:
            state = torch.load(Path(saved) / "state.pt")
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    for step, (x, y) in enumerate(loader):
        if step < first:
            continue
        if config["dies"]:
            die_once(folder, step, context.get_world_rank())
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(config["step_s"])
        note(folder, step + 1, context.get_world_rank())
        if (step + 1) % EVERY == 0:
            with tempfile.TemporaryDirectory() as scratch:
                saved = None
                if context.get_world_rank() == 0:
                    state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
                    torch.save(state, Path(scratch) / "state.pt")
                    saved = Checkpoint.from_directory(scratch)
                ray.train.report({"step": step + 1}, checkpoint=saved)


def run_bare(folder: str, steps: int = STEPS, dies: bool = True, step_s: float = 0.0) -> None:
    """`dies`: a worker kills itself at step DIES_AT. `step_s`: what a step takes at least."""
    TorchTrainer(
        bare,
        train_loop_config={"folder": folder, "steps": steps, "dies": dies, "step_s": step_s},
        scaling_config=ScalingConfig(num_workers=WORKERS),
        run_config=RunConfig(
            name="bare",
            storage_path=folder,
            failure_config=FailureConfig(max_failures=1),
            checkpoint_config=CheckpointConfig(num_to_keep=3),
        ),
    ).fit()


def ours(folder: str) -> None:
    """The same loop with keepstep."""
    run = keepstep.start()
    model, optimizer, loader = run.prepare(*make(STEPS))
    for x, y in run.steps(loader):
        die_once(folder, run.step, run.rank)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        note(folder, run.step + 1, run.rank)


def run_ours(folder: str) -> None:
    keepstep.launch(
        lambda: ours(folder), engine="ray", workers=WORKERS, name="ours", storage=folder, checkpoint_every=EVERY,
        device="cpu",
    )  # fmt: skip


def measured(start: Any) -> dict[str, float]:
    """Seconds from the call to the first completed step, and from a worker's death to the next."""
    with tempfile.TemporaryDirectory(prefix="keepstep-bench-") as folder:
        began = time.time()
        start(folder)
        steps = [json.loads(line) for line in (Path(folder) / "steps_0.jsonl").read_text().splitlines()]
        died = float((Path(folder) / "died").read_text())
    after = [step["time"] for step in steps if step["process"] != steps[0]["process"]]
    assert steps[-1]["step"] == STEPS, "it did not come to its end"
    assert after, "nobody died"
    return {"start": steps[0]["time"] - began, "recovery": after[0] - died}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", help="write JSON to this file in benchmarks/results/")
    arguments = parser.parse_args()
    ray.init(address="local", num_cpus=2 * WORKERS, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    found: dict[str, list[dict[str, float]]] = {"bare Ray Train": [], "keepstep": []}
    for number in range(arguments.rounds):
        for name, start in (("bare Ray Train", run_bare), ("keepstep", run_ours)):
            found[name].append(measured(start))
            shown = ", ".join(f"{what} {seconds:.1f} s" for what, seconds in found[name][-1].items())
            print(f"round {number} {name}: {shown}", flush=True)
    rows: list[Row] = []
    for what, title, target in (
        ("start", "from the call to the first step", 1.0),
        ("recovery", "from a worker's death to a step", 0.5),
    ):
        pairs = [(a[what], b[what]) for a, b in zip(found["bare Ray Train"], found["keepstep"], strict=True)]
        rows.append(compare(title, ("bare Ray Train", "keepstep"), pairs, target))
    print_table(rows)
    if arguments.output:
        write_json(RESULTS / arguments.output, rows, {**vars(arguments), "output": None, "workers": WORKERS})
    ray.shutdown()


if __name__ == "__main__":
    main()
