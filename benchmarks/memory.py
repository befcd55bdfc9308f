"""What a worker holds in memory under each strategy: counted from its tensors, measured, and what theory promises."""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import torch
import torch.distributed as dist
from measure import RESULTS
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import keepstep

WIDTH, BLOCKS, BATCH = 1152, 12, 4
WARM_STEPS, STEPS = 3, 6
SAMPLE_S = 2e-3
MB = 1e6
STRATEGIES = ("ddp", "fsdp2", "zero1", "zero2", "zero3")
THEIR_SIZES = {  # of what is gathered and reduced at a time, unless told otherwise; keepstep's are those of a block
    "reduce_bucket_size": 500_000_000,
    "stage3_prefetch_bucket_size": 50_000_000,
    "stage3_max_live_parameters": 1_000_000_000,
    "stage3_max_reuse_distance": 1_000_000_000,
}
KINDS = ("weights", "copy", "gradients", "optimizer")

# -- the worker --------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.narrow(torch.relu(self.wide(x)))
        return out


def resident() -> int:
    """Bytes of this process's own memory that it has touched; not the files of its libraries, which workers share."""
    pages = Path("/proc/self/statm").read_text().split()
    return (int(pages[1]) - int(pages[2])) * os.sysconf("SC_PAGE_SIZE")


class Peak:
    """Within, looks every few milliseconds: the kernel's own maximum could not be set back to zero."""

    def __enter__(self) -> Peak:
        self.bytes = resident()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._over.wait(SAMPLE_S):
            self.bytes = max(self.bytes, resident())

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._over.set()
        self._thread.join()


class Ledger:
    """Counts tensors by what they are for; those that share memory count once, as what is asked for first."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        # DeepSpeed's half of ZeRO has buffers of its own, and keepstep gives no access to it.
        made = [thing for thing in gc.get_objects() if type(thing).__name__.startswith("DeepSpeedZeroOptimizer")]
        self._zero = made[0] if made else None

    def count(self) -> dict[str, int]:
        seen: set[int] = set()
        parameters = list(self._model.parameters())
        stepped = [p for group in self._optimizer.param_groups for p in group["params"]]
        state = [value for kept in self._optimizer.state.values() for value in kept.values()]
        zero = vars(self._zero) if self._zero else {}
        buckets = zero.get("ipg_buckets", {}).values()
        total([bucket.buffer for bucket in buckets], seen)  # gradients that lie in a bucket are counted with it
        gradients = [p.grad for p in (*parameters, *stepped)]
        gradients += [
            zero.get(name) for name in ("all_grad_tensors", "averaged_gradients", "grad_partitions_flat_buffer")
        ]
        return {
            "weights": total([*parameters, *(getattr(p, "ds_tensor", None) for p in parameters)], seen),
            # Under stage 3 the optimizer is given them only while it steps.
            "copy": total([*stepped, zero.get("fp32_partitioned_groups_flat")], seen),
            "gradients": total(gradients, seen),
            "optimizer": total(state, seen),
            "bucket": len(buckets) * int(zero.get("reduce_bucket_size", 0)) * torch.float32.itemsize,
        }


def total(things: Any, seen: set[int]) -> int:
    return sum(new_bytes(tensor, seen) for tensor in tensors_in(things))


def tensors_in(thing: Any) -> Iterable[torch.Tensor]:
    if isinstance(thing, torch.Tensor):
        yield thing.to_local() if hasattr(thing, "to_local") else thing
    elif isinstance(thing, (list, tuple)):
        for each in thing:
            yield from tensors_in(each)
    elif isinstance(thing, dict):
        yield from tensors_in(list(thing.values()))


def new_bytes(tensor: torch.Tensor, seen: set[int]) -> int:
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0 or storage.data_ptr() in seen:
        return 0
    seen.add(storage.data_ptr())
    return storage.nbytes()


def warm_up() -> None:
    """Fills what libraries keep for themselves, which is no strategy's."""
    x = torch.randn(WIDTH, WIDTH)
    dist.all_reduce(x @ x)


def step_once(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, ledger: Ledger) -> dict[str, int]:
    """One step; what was there when all gradients were, before anything was given back."""
    model(x).square().mean().backward()
    counted = ledger.count()
    optimizer.step()
    optimizer.zero_grad()
    return counted


def train() -> dict[str, Any]:
    """Trains a few steps in this worker, looking at itself."""
    run = keepstep.start(checkpoint_every="10h")  # no save falls into it; the one at the end comes after
    warm_up()
    gc.collect()
    before = resident()
    with Peak() as preparing:
        model = nn.Sequential(*[Block() for _ in range(BLOCKS)])
        # Not fused it makes copies as long as what it is given: a tensor under ddp, all that a worker has under ZeRO.
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        parameters = sum(p.numel() for p in model.parameters())
        data = TensorDataset(torch.randn(64 * (WARM_STEPS + STEPS), WIDTH))
        model, optimizer, loader = run.prepare(model, optimizer, DataLoader(data, BATCH))
    ledger, batches = Ledger(model, optimizer), iter(run.steps(loader))
    for _ in range(WARM_STEPS):
        step_once(model, optimizer, next(batches)[0], ledger)
    seconds, counts, steady = [], [], []
    with Peak() as stepping:
        for _ in range(STEPS):
            began = time.perf_counter()
            counts.append(step_once(model, optimizer, next(batches)[0], ledger))
            seconds.append(time.perf_counter() - began)
            steady.append(resident() - before)
    return {
        "parameters": parameters,
        "counted": counts[-1],
        "between_steps": statistics.median(steady),
        "peak_of_steps": stepping.bytes - before,
        "peak_of_preparing": preparing.bytes - before,
        "uss": psutil.Process().memory_full_info().uss,
        "step_s": statistics.median(seconds),
    }


# -- the table ---------------------------------------------------------------------------------------------------------


def promised(strategy: str, workers: int) -> float:
    """Bytes a parameter: 4 of weights, 4 of gradients, 8 of AdamW's state, each whole or divided."""
    whole = {"ddp": 16, "zero1": 8, "zero2": 4, "zero3": 0, "fsdp2": 0}[strategy]
    return whole + (16 - whole) / workers


def measured(strategy: str, workers: int, their_sizes: bool) -> dict[str, Any]:
    """One run's numbers, in bytes: those of the worker that has most."""
    with tempfile.TemporaryDirectory(prefix="keepstep-bench-") as name:
        folder = Path(name)
        (folder / "deepspeed.json").write_text(json.dumps({"zero_optimization": THEIR_SIZES}))
        command = [sys.executable, "-m", "keepstep", "run", f"--workers={workers}", f"--strategy={strategy}"]
        command += ["--device=cpu", "--engine=torchrun", "--max-failures=0", "--storage=runs"]
        command += ["--deepspeed-config=deepspeed.json"] if their_sizes else []
        # What is freed goes back to the system at once; by itself the C library would keep it, and it would count.
        kept = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [*command, str(Path(__file__).resolve()), "--worker", str(folder)],
            cwd=folder, env={**os.environ, **kept}, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        found = [json.loads(path.read_text()) for path in folder.glob("rank*.json")]
    if len(found) != workers:
        raise RuntimeError(f"{' '.join(command)} left with {done.returncode}:\n{done.stdout}{done.stderr}")
    largest = max(found, key=lambda one: one["peak_of_steps"])
    largest |= {"strategy": strategy, "workers": workers, "their_sizes": their_sizes}
    return {**largest, "promised": promised(strategy, workers) * largest["parameters"]}


def print_row(row: dict[str, Any], ddp: dict[str, Any]) -> None:
    name = row["strategy"] + (" their sizes" if row["their_sizes"] else "")
    counted = [row["counted"][kind] for kind in KINDS]
    kinds = " ".join(f"{value / MB:>9.0f}" for value in (*counted, sum(counted), row["promised"]))
    sizes = " ".join(
        f"{row[key] / MB:>9.0f}" for key in ("between_steps", "peak_of_steps", "peak_of_preparing")
    )  # fmt: skip
    ratios = f"{row['peak_of_steps'] / ddp['peak_of_steps']:>6.2f} {row['promised'] / ddp['promised']:>8.2f}"
    bucket = row["counted"]["bucket"] / MB
    print(f"{name:<17} {row['workers']:>7} {kinds} {sizes} {ratios} {bucket:>7.0f} {row['step_s']:>7.2f}", flush=True)


def print_header() -> None:
    kinds = " ".join(f"{kind:>9}" for kind in (*KINDS, "sum", "promised", "between", "peak", "preparing"))
    print(f"{'strategy':<17} {'workers':>7} {kinds} {'/ ddp':>6} {'promised':>8} {'bucket':>7} {'step, s':>7}")


def write_json(path: Path, rows: list[dict[str, Any]]) -> None:
    machine = {"platform": platform.platform(), "cores": os.cpu_count(), "load": os.getloadavg()}
    machine |= {"torch": torch.__version__, "python": platform.python_version()}
    settings = {
        "width": WIDTH,
        "blocks": BLOCKS,
        "batch": BATCH,
        "steps": STEPS,
        "their_sizes": THEIR_SIZES,
        "unit": "bytes",
    }
    path.write_text(json.dumps({"settings": settings, "machine": machine, "rows": rows}, indent=2) + "\n")
    print(f"\nwritten: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    parser.add_argument(
        "--strategies", choices=STRATEGIES, nargs="+", default=STRATEGIES, help="ddp is always measured"
    )
    parser.add_argument("--output", help="write JSON to this file in benchmarks/results/")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        found = train()
        (arguments.worker / f"rank{dist.get_rank()}.json").write_text(json.dumps(found))
        return
    others = [strategy for strategy in arguments.strategies if strategy != "ddp"]
    contenders = [("ddp", False), *((strategy, False) for strategy in others)]
    contenders += [(strategy, True) for strategy in others if strategy.startswith("zero")]
    rows: list[dict[str, Any]] = []
    print_header()
    for workers in arguments.workers:
        of_ddp = len(rows)
        for strategy, their_sizes in contenders:
            rows.append(measured(strategy, workers, their_sizes))
            print_row(rows[-1], rows[of_ddp])
    if arguments.output:
        write_json(RESULTS / arguments.output, rows)


if __name__ == "__main__":
    main()
