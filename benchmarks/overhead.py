"""What keepstep costs: microseconds a step, seconds of start-up, and time that a save holds the training loop up."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from measure import RESULTS, Row, Spread, compare, paired, print_table, synchronize, timed, write_json
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import keepstep
from keepstep import current

STEP_S = 5e-3
BLOCK_STEPS = 100
CLASSES = 10

# -- 1: steps ----------------------------------------------------------------------------------------------------------


class OwnDataset(Dataset[tuple[torch.Tensor, ...]]):
    """What users write: keepstep cannot know that it draws no random numbers, and has to look."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self._tensors = tensors

    def __len__(self) -> int:
        return len(self._tensors[0])

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        return tuple(tensor[index] for tensor in self._tensors)


@dataclass(frozen=True)
class Job:
    """A small training job, the same for both loops."""

    device: torch.device
    width: int
    batch_size: int
    dataset: type[TensorDataset] | type[OwnDataset] = TensorDataset

    def build(self) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[tuple[torch.Tensor, ...]]]:
        model = nn.Sequential(
            nn.Linear(64, self.width), nn.ReLU(), nn.Linear(self.width, self.width), nn.ReLU(),
            nn.Linear(self.width, CLASSES),
        )  # fmt: skip
        samples = 500 * self.batch_size
        data = self.dataset(torch.randn(samples, 64), torch.randint(CLASSES, (samples,)))
        pinned = self.device.type == "cuda"
        loader = DataLoader(data, batch_size=self.batch_size, shuffle=True, pin_memory=pinned, drop_last=True)
        return model, torch.optim.SGD(model.parameters(), lr=1e-3), loader


def raw_steps(job: Job, folder: Path) -> Iterator[None]:
    """What a careful person writes by hand. Yields after each step, so that blocks of both loops can alternate."""
    model, optimizer, loader = job.build()
    model.to(job.device)
    with (folder / "raw.jsonl").open("w") as file:
        losses: list[torch.Tensor] = []
        written, step = time.monotonic(), 0
        while True:
            for x, y in loader:
                x, y = x.to(job.device, non_blocking=True), y.to(job.device, non_blocking=True)
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                if job.device.type == "cpu":
                    file.write(json.dumps({"step": step, "loss": loss.item()}) + "\n")
                else:
                    losses.append(loss.detach())  # reading each would make the GPU wait: once a second is enough
                    if time.monotonic() - written > 1:
                        values = torch.stack(losses).tolist()
                        first = step - len(values) + 1
                        file.writelines(json.dumps({"step": first + i, "loss": v}) + "\n" for i, v in enumerate(values))
                        losses, written = [], time.monotonic()
                yield


def keepstep_steps(job: Job, folder: Path) -> Iterator[None]:
    """The same loop with keepstep. No save falls into the measurement: that is measured by itself."""
    run = keepstep.start(name="steps", storage=str(folder), device=job.device.type, checkpoint_every="10h")
    model, optimizer, train = run.prepare(*job.build())
    for _ in run.epochs(10**6):
        for x, y in run.steps(train):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss=loss)
            yield


def advance(steps: Iterator[None], device: torch.device, count: int = BLOCK_STEPS) -> float:
    """Seconds that the next `count` steps take."""
    return timed(lambda: list(islice(steps, count)), device)


def calibrated(device: torch.device, folder: Path) -> Job:
    """The job whose raw step takes about STEP_S here."""
    batch_size = 64 if device.type == "cpu" else 256
    width = 256
    while width < 16384:
        steps = raw_steps(Job(device, width, batch_size), folder)
        advance(steps, device, 10)
        step_s = min(advance(steps, device, 1) for _ in range(50))  # others use this machine: the least is the truth
        if step_s > 0.8 * STEP_S:
            break
        # Work grows with the square of the width, but not at first, where launching it is most of the time.
        width = max(width + 32, int(min(2 * width, width * (STEP_S / step_s) ** 0.5)))
    return Job(device, width, batch_size)


def measure_steps(name: str, job: Job, pairs: int, target: float | None) -> Row:
    """Blocks of both loops, alternating within this process."""
    folder = Path(tempfile.mkdtemp(prefix="keepstep-bench-"))
    try:
        raw, ours = raw_steps(job, folder), keepstep_steps(job, folder)
        for steps in (raw, ours):
            advance(steps, job.device, 2 * BLOCK_STEPS)
        found = paired(lambda: advance(raw, job.device), lambda: advance(ours, job.device), pairs)
        for steps in (raw, ours):
            steps.close()  # type: ignore[attr-defined]
        current.end()
    finally:
        shutil.rmtree(folder)
    steps_s = [(a / BLOCK_STEPS, b / BLOCK_STEPS) for a, b in found]
    row = compare(name, ("raw PyTorch loop", "keepstep"), steps_s, target)
    extra = Spread.of([(b - a) * 1e6 for a, b in steps_s])
    row.notes["extra per step"] = extra.show(" us", 1)
    row.notes["ratio of the totals"] = round(sum(b for _, b in found) / sum(a for a, _ in found), 4)
    row.notes["width, batch"] = f"{job.width}, {job.batch_size}"
    return row


# -- 2: start-up -------------------------------------------------------------------------------------------------------

RAW_SCRIPT = """
import sys, time
import torch, torch.distributed as dist, torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
data = TensorDataset(torch.randn(64, 64), torch.randint(10, (64,)))
sampler = DistributedSampler(data)
for epoch in range(1):
    sampler.set_epoch(epoch)
    for x, y in DataLoader(data, batch_size=32, sampler=sampler):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step(); optimizer.zero_grad()
        if dist.get_rank() == 0:
            open(sys.argv[1], "w").write(str(time.time()))
dist.destroy_process_group()
"""

KEEPSTEP_SCRIPT = """
import sys, time
import torch, torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import keepstep

run = keepstep.start()
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
data = TensorDataset(torch.randn(64, 64), torch.randint(10, (64,)))
model, optimizer, train = run.prepare(model, optimizer, DataLoader(data, batch_size=64, shuffle=True))
for epoch in run.epochs(1):
    for x, y in run.steps(train):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step(); optimizer.zero_grad()
        if run.is_main:
            open(sys.argv[1], "w").write(str(time.time()))
"""


def time_to_first_step(command: list[str], stamp: Path) -> float:
    """Seconds from launching a command to the end of its first step."""
    stamp.unlink(missing_ok=True)
    began = time.time()
    done = subprocess.run([*command, str(stamp)], cwd=stamp.parent, capture_output=True, text=True, timeout=300)
    # Not the exit code: torch's threads now and then abort the raw script's process on its way out.
    if not stamp.exists():
        raise RuntimeError(f"{' '.join(command)} left with {done.returncode}:\n{done.stdout}{done.stderr}")
    return float(stamp.read_text()) - began


def measure_startup(pairs: int) -> Row:
    """Two gloo workers on the CPU, whatever the device: what differs is launching, not computing."""
    with tempfile.TemporaryDirectory(prefix="keepstep-bench-") as name:
        folder = Path(name)
        (folder / "raw_ddp.py").write_text(RAW_SCRIPT)
        (folder / "same_model.py").write_text(KEEPSTEP_SCRIPT)
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "raw_ddp.py"]
        ours = [sys.executable, "-m", "keepstep", "run", "--workers=2", "--device=cpu"]

        def raw() -> float:
            return time_to_first_step(torchrun, folder / "raw_first_step")

        def with_keepstep() -> float:
            # A name each: two runs within a second would share the default one, and the second had nothing to do.
            return time_to_first_step([*ours, f"--name=r{time.time_ns()}", "same_model.py"], folder / "first_step")

        raw(), with_keepstep()  # fills the disk cache and writes bytecode
        found = paired(raw, with_keepstep, pairs)
    return compare("start-up to first step, 2 workers", ("torchrun raw_ddp.py", "keepstep run"), found, 1.2)


# -- 3: saves ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Saves:
    """What one run's saves cost its loop."""

    first_s: float
    """Blocked by the first save, which also allocates the host memory."""
    blocked_s: list[float]
    """Blocked by each later one."""
    step_s: float
    """Median time of a step's body."""


def wait_until_saved(run: keepstep.Run, step: int) -> None:
    """Makes saves lie as far apart as in a real run, where the one before is written, and older ones deleted."""
    patience = time.monotonic() + 120
    while time.monotonic() < patience:
        events = [json.loads(line) for line in (run.path / "events.jsonl").read_text().splitlines()]
        if any(event["event"] == "checkpoint" and event["step"] == step for event in events):
            time.sleep(0.05)  # the event is the last thing but for the end of the thread
            return
        time.sleep(0.01)
    raise RuntimeError(f"the save of step {step} was not committed within two minutes")


def saving_run(mode: str, device: torch.device, parameters: int, saves: int, every: int) -> Saves:
    """Trains a large model and saves often; a save's cost is what the boundary takes more than one without a save."""
    width = int((parameters / 8) ** 0.5)
    with tempfile.TemporaryDirectory(prefix="keepstep-bench-") as storage:
        run = keepstep.start(
            name="saves", storage=storage, device=device.type, checkpoint_mode=mode, checkpoint_every=every, keep=1
        )
        model = nn.Sequential(*[nn.Linear(width, width) for _ in range(8)])
        data = TensorDataset(torch.randn(8 * (saves * every + 1), width))
        model, optimizer, train = run.prepare(model, torch.optim.AdamW(model.parameters()), DataLoader(data, 8))
        gaps: dict[int, float] = {}
        bodies = []
        ended = 0.0
        for (x,) in run.steps(train):
            arrived = time.perf_counter()
            if run.step:
                gaps[run.step] = arrived - ended
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if run.step >= every and (run.step + 1) % every == 0:
                wait_until_saved(run, run.step + 1 - every)
            synchronize(device)  # else the boundary would be charged with what is left of the step
            ended = time.perf_counter()
            bodies.append(ended - arrived)
        current.end()
    plain = Spread.of([gap for step, gap in gaps.items() if step % every]).median
    first, *later = [gap - plain for step, gap in sorted(gaps.items()) if step % every == 0]
    return Saves(first, later, Spread.of(bodies).median)


def measure_saves(device: torch.device, parameters: int, pairs: int) -> Row:
    """Runs with synchronous and asynchronous saves, alternating, each in a folder of its own."""
    runs: dict[str, list[Saves]] = {"sync": [], "async": []}

    def one(mode: str) -> Callable[[], float]:
        def work() -> float:
            runs[mode].append(saving_run(mode, device, parameters, saves=5, every=5))
            return 0.0

        return work

    paired(one("sync"), one("async"), pairs)
    found = [
        pair
        for sync_run, async_run in zip(runs["sync"], runs["async"], strict=True)
        for pair in zip(sync_run.blocked_s, async_run.blocked_s, strict=True)
    ]
    row = compare(f"blocked by a save, {parameters / 1e6:.0f}M parameters", ("sync", "async"), found, 0.10)
    for mode, done in runs.items():
        row.notes[f"first save of a run, {mode}"] = Spread.of([run.first_s for run in done]).show(" s")
        row.notes[f"a step's body, {mode}"] = Spread.of([run.step_s for run in done]).show(" s")
    return row


# -- the script --------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer pairs and a smaller model: a minute, rough numbers")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", help="write JSON to this file in benchmarks/results/")
    parser.add_argument("--only", choices=("steps", "startup", "saves"), nargs="+", help="measure these alone")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    wanted = set(arguments.only or ("steps", "startup", "saves"))
    quick = arguments.quick
    rows: list[Row] = []
    threads = torch.get_num_threads()
    if "steps" in wanted:
        torch.set_num_threads(1)
        with tempfile.TemporaryDirectory() as folder:
            job = calibrated(device, Path(folder))
        for dataset in (TensorDataset, OwnDataset):
            named = f"steps of about 5 ms, {dataset.__name__}"
            rows.append(measure_steps(named, replace(job, dataset=dataset), 10 if quick else 60, 1.01))
        # Beside a short step the cost stands out of the noise; its ratio promises nothing.
        for dataset in (TensorDataset, OwnDataset):
            tiny = Job(device, 16, 64, dataset)
            rows.append(measure_steps(f"shortest steps, {dataset.__name__}", tiny, 20 if quick else 80, None))
        torch.set_num_threads(threads)
    if "startup" in wanted:
        rows.append(measure_startup(2 if quick else 7))
    if "saves" in wanted:
        rows.append(measure_saves(device, 10_000_000 if quick else 50_000_000, 1 if quick else 3))
    print_table(rows)
    if arguments.output:
        settings = {"device": arguments.device, "quick": quick, "threads_for_steps": 1}
        write_json(RESULTS / arguments.output, rows, settings)


if __name__ == "__main__":
    main()
