"""Kills a random worker at a random moment, and measures until the next completed step: keepstep on torchrun and on
Ray, beside a bare torchrun and a bare Ray Train whose scripts save and resume by hand, taking turns."""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from measure import Row, compare, print_table, write_json
from ray_train import run_bare
from small_loop import EVERY, STEP_S, WORKERS

from keepstep.observe.recovery import PHASES

LOOP = Path(__file__).with_name("small_loop.py")
STEPS, FIRST, LAST = 720, 500, 700
"""The steps between which the worker dies: by then standbys, which start after the first step, are there."""
BARE_STEPS, BARE_FIRST, BARE_LAST = 60, 20, 50
"""The same without keepstep: Ray Train's checkpoints take seconds each, and nothing is waited for."""
TARGETS = {"bare torchrun": 0.5, "bare Ray Train": 1 / 6}
LIMIT_S = 300.0


def noted(folder: str, rank: int) -> list[dict[str, Any]]:
    path = Path(folder) / f"steps_{rank}.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


class Killer(threading.Thread):
    """Kills a worker once it has made so many steps, and a moment more; notes when."""

    def __init__(self, folder: str, is_bare: bool, chance: random.Random) -> None:
        super().__init__(daemon=True)
        steps = (BARE_FIRST, BARE_LAST) if is_bare else (FIRST, LAST)
        self._folder, self.rank, self.step = folder, chance.randrange(WORKERS), chance.randrange(*steps)
        self._moment_s = chance.uniform(0, 2 * STEP_S)
        self.killed_at: float | None = None

    def run(self) -> None:
        limit = time.monotonic() + LIMIT_S
        while not (steps := noted(self._folder, self.rank)) or steps[-1]["step"] < self.step:
            if time.monotonic() > limit:
                return
            time.sleep(0.01)
        time.sleep(self._moment_s)
        self.killed_at = time.time()
        os.kill(steps[-1]["process"], signal.SIGKILL)


def command(*words: str, **environment: str) -> None:
    chosen = {**os.environ, **environment}
    done = subprocess.run([sys.executable, "-m", *words], env=chosen, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr


def keepstep(folder: str, *flags: str) -> None:
    words = ["--workers", str(WORKERS), "--device", "cpu", "--name", "run", "--storage", folder]
    command("keepstep", "run", *flags, *words, "--checkpoint-every", str(EVERY), str(LOOP), folder, str(STEPS))


def bare_torchrun(folder: str) -> None:
    words = ["--standalone", f"--nproc-per-node={WORKERS}", "--max-restarts=1"]
    words += [str(LOOP), folder, str(BARE_STEPS), "--by-hand"]
    # Without it, torch 2.13's restarted workers now and then find their dead predecessors' addresses, and wait forever.
    command("torch.distributed.run", *words, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")


def measured(start: Callable[[str], None], is_bare: bool, chance: random.Random) -> dict[str, Any]:
    """Seconds from the death to the next completed step, by the clock of who killed; and keepstep's own phases."""
    with tempfile.TemporaryDirectory(prefix="keepstep-bench-") as folder:
        killer = Killer(folder, is_bare, chance)
        killer.start()
        start(folder)
        killer.join()
        steps, events = noted(folder, 0), Path(folder) / "run" / "events.jsonl"
        own = [json.loads(line) for line in events.read_text().splitlines()] if events.exists() else []
    assert killer.killed_at is not None, "nobody was killed"
    assert steps[-1]["step"] == (BARE_STEPS if is_bare else STEPS), "it did not come to its end"
    after = [step["time"] for step in steps if step["process"] != steps[0]["process"]]
    phases = [event["seconds"] for event in own if event["event"] == "recovered"]
    return {
        "seconds": after[0] - killer.killed_at,
        "rank": killer.rank,
        "step": killer.step,
        "phases": phases[0] if phases else None,
    }


def print_phases(name: str, found: list[dict[str, Any]]) -> None:
    print(f"\n{name}, seconds by phase: median [least, most]")
    for phase in PHASES:
        values = sorted(one["phases"][phase] for one in found)
        print(f"  {phase:<12} {values[len(values) // 2]:.3f} [{values[0]:.3f}, {values[-1]:.3f}]")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--output", type=Path, help="write JSON to this file")
    arguments = parser.parse_args()
    chance = random.Random(arguments.seed)
    ray.init(address="local", num_cpus=2 * WORKERS, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    address = ray.get_runtime_context().gcs_address
    contenders: dict[str, Callable[[str], None]] = {
        "bare torchrun": bare_torchrun,
        "keepstep on torchrun": lambda folder: keepstep(folder, "--engine", "torchrun"),
        "bare Ray Train": lambda folder: run_bare(folder, BARE_STEPS, dies=False, step_s=STEP_S),
        "keepstep on ray": lambda folder: keepstep(folder, "--engine", "ray", "--address", address),
    }
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in contenders}
    for number in range(arguments.rounds):
        for name, start in contenders.items():
            found[name].append(measured(start, name in TARGETS, chance))
            print(f"round {number} {name}: {found[name][-1]['seconds']:.2f} s", flush=True)
    ray.shutdown()
    rows: list[Row] = []
    for ours in ("keepstep on torchrun", "keepstep on ray"):
        for bare, target in TARGETS.items():
            pairs = [(a["seconds"], b["seconds"]) for a, b in zip(found[bare], found[ours], strict=True)]
            rows.append(compare(f"{ours} / {bare}", (bare, ours), pairs, target))
        rows[-1].notes["rounds"] = found[ours]
    print("\nfrom a worker's death to the next completed step: median [least, most]")
    for name, results in found.items():
        values = sorted(one["seconds"] for one in results)
        print(f"  {name:<22} {values[len(values) // 2]:.2f} s [{values[0]:.2f}, {values[-1]:.2f}]")
    for name in ("keepstep on torchrun", "keepstep on ray"):
        print_phases(name, found[name])
    print_table([Row(row.name, row.baseline, row.ratio, row.target, row.seconds) for row in rows])
    if arguments.output:
        write_json(arguments.output, rows, {**vars(arguments), "output": None, "workers": WORKERS})


if __name__ == "__main__":
    main()
