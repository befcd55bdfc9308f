"""Makes the workshop's comparison tables anew, from measurement on this machine: results/tables.md and tables.json.

    python workshop/compare.py                       # some 10 minutes on 2 cores
    python workshop/compare.py --only code memory    # some of the tables

Every version trains the same model on the same samples with as many workers, each on one core (or one GPU), and they
take turns, so that a busy machine slows all alike. Nothing is taken over from elsewhere.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import psutil
import torch

from common.count import count, legend, lines_by_step

WORKSHOP = Path(__file__).resolve().parent
SINGLE = "01-ddp-pytorch-only/train_single_machine.py"
BIN = Path(sys.executable).parent


@dataclass(frozen=True)
class Version:
    name: str
    script: str
    launch: str
    """As a person types it, in the lesson's folder; {n} workers."""

    def command(self, workers: int, output: str, arguments: Iterable[str]) -> list[str]:
        words = self.launch.format(n=workers).split()
        if words[:2] == ["keepstep", "run"]:
            words[2:2] = ["--storage", f"{output}/runs"]  # gone with the rest, not beside the lesson
        program = [sys.executable] if words[0] == "python" else [str(BIN / words[0])]
        return [*program, *words[1:], *arguments]


VERSIONS = (
    Version("one process", SINGLE, "python train_single_machine.py"),
    Version("vanilla DDP", "01-ddp-pytorch-only/train_ddp.py", "torchrun --nproc_per_node={n} train_ddp.py"),
    Version("Ray Train, DDP", "02-ddp-pytorch-ray/train_ray_ddp.py", "python train_ray_ddp.py --num-workers {n}"),
    Version(
        "Ray Train, FSDP2",
        "03-fsdp-pytorch-ray-deepspeed/train_ray_fsdp2.py",
        "python train_ray_fsdp2.py --num-workers {n}",
    ),
    Version(
        "Ray Train, ZeRO-2",
        "03-fsdp-pytorch-ray-deepspeed/train_ray_deepspeed.py",
        "python train_ray_deepspeed.py --num-workers {n} --zero-stage 2",
    ),
    *(
        Version(
            f"keepstep, {strategy}",
            "01-ddp-pytorch-only/train_keepstep.py",
            f"keepstep run --workers {{n}} --strategy {strategy} train_keepstep.py",
        )
        for strategy in ("ddp", "fsdp2", "zero2")
    ),
)
Rows = list[dict[str, Any]]


def measure_code(_: argparse.Namespace) -> Rows:
    """Lines, counted."""
    rows = []
    for script in dict.fromkeys(version.script for version in VERSIONS):
        counted = count(WORKSHOP / script, WORKSHOP / SINGLE)
        rows.append(
            {
                "script": script.partition("/")[2], "lines of code": counted.total, "boilerplate": counted.boilerplate,
                "set-up steps": counted.steps, "changed from one process": counted.changed,
            }
        )  # fmt: skip
    return rows


def measure_steps(_: argparse.Namespace) -> Rows:
    """What the boilerplate is for, and how many lines each takes."""
    rows = []
    for script in dict.fromkeys(version.script for version in VERSIONS if version.script != SINGLE):
        text = (WORKSHOP / script).read_text()
        by_step, named = lines_by_step(text), legend(text)
        said = "; ".join(f"{named.get(step, step)}: {lines}" for step, lines in sorted(by_step.items()))
        rows.append({"script": script.partition("/")[2], "set-up steps, with their lines": said})
    return rows


def measure_training(flags: argparse.Namespace) -> Rows:
    """Time, loss and accuracy; the versions take turns."""
    trained: dict[str, list[Training]] = {version.name: [] for version in VERSIONS}
    for _ in range(flags.rounds):
        for version in VERSIONS:
            trained[version.name].append(train(version, flags))
            print(f"  {version.name}: {trained[version.name][-1]}", flush=True)
    alone = statistics.median(each.epoch_s for each in trained[VERSIONS[0].name])
    rows = []
    for version in VERSIONS:
        rounds = trained[version.name]
        workers = 1 if version is VERSIONS[0] else flags.workers
        epoch_s = statistics.median(each.epoch_s for each in rounds)
        rows.append(
            {
                "version": version.name, "launch": version.launch.format(n=flags.workers), "workers": workers,
                "in all": spread([each.total_s for each in rounds], "s"),
                "an epoch": spread([each.epoch_s for each in rounds], "s"),
                "speed-up": f"{alone / epoch_s:.2f}", "efficiency": f"{alone / epoch_s / workers:.0%}",
                "test loss": f"{rounds[-1].test_loss:.4f}", "accuracy": f"{rounds[-1].accuracy:.2%}",
            }
        )  # fmt: skip
    return rows


@dataclass(frozen=True)
class Training:
    total_s: float
    epoch_s: float
    """The last, from the line that ended the one before to its own."""
    test_loss: float
    accuracy: float

    def __str__(self) -> str:
        return f"{self.total_s:.1f} s, an epoch {self.epoch_s:.1f} s, accuracy {self.accuracy:.2%}"


_EPOCH = re.compile(r"epoch (\d+): .*test loss ([\d.]+), accuracy ([\d.]+)%")


def train(version: Version, flags: argparse.Namespace) -> Training:
    with tempfile.TemporaryDirectory(prefix="workshop-") as output:
        arguments = settings(flags, output, flags.epochs, version)
        began = time.perf_counter()
        process = start(version, flags.workers, output, arguments)
        ended: list[tuple[float, float, float]] = []
        text = ""
        for line in process.stdout or ():
            text += line
            if found := _EPOCH.search(line):
                ended.append((time.perf_counter(), float(found[2]), float(found[3]) / 100))
        if process.wait() != 0 or len(ended) < flags.epochs:
            sys.exit(f"{version.name} ended with exit code {process.returncode}:\n{text[-3000:]}")
    (before, *_), (last, test_loss, accuracy) = ended[-2:]
    return Training(time.perf_counter() - began, last - before, test_loss, accuracy)


def settings(flags: argparse.Namespace, output: str, epochs: int, version: Version) -> list[str]:
    words = ["--epochs", str(epochs), "--batch-size", "128", "--limit", str(flags.limit), "--output", output]
    words += ["--use-gpu", str(flags.use_gpu)]
    return words + (["--order", "torch"] if "keepstep" in version.name else [])


def start(version: Version, workers: int, output: str, arguments: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        version.command(workers, output, arguments), cwd=(WORKSHOP / version.script).parent, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip


def measure_kill(flags: argparse.Namespace) -> Rows:
    """What becomes of a training whose worker gets a SIGKILL; lesson 05 counts samples for those that go on."""
    rows = [kill_vanilla(flags)]
    for name, version in (("Ray Train, DDP", "raw"), ("keepstep, ddp", "keepstep")):
        with tempfile.TemporaryDirectory(prefix="workshop-") as output:
            script = WORKSHOP / "05-fault-tolerance" / "kill_and_count.py"
            words = [sys.executable, str(script), version, "--kills", "1", "--seed", "7", "--epochs", "2"]
            words += ["--limit", str(flags.limit // 2), "--batch-size", "128", "--output", output]
            words += ["--use-gpu", str(flags.use_gpu)]
            done = subprocess.run(words, capture_output=True, text=True)
            (found,) = Path(output).rglob("verdict.json") if done.returncode == 0 else (None,)
            if found is None:
                sys.exit(f"{' '.join(words)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
            verdict = json.loads(found.read_text())
        tally, recovery_s = verdict["tally"], verdict["kills"][0]["recovery_s"]
        rows.append(
            {
                "version": name, "what happened": "it went on",
                "next step after": f"{recovery_s:.1f} s" if recovery_s else "never",
                "samples repeated": tally["repeated"], "lost": tally["lost"], "computed for nothing": tally["redone"],
                "weights as if nothing had been": "yes" if verdict["weights_apart"] == 0 else "no",
            }
        )  # fmt: skip
        print(f"  {rows[-1]}", flush=True)
    return rows


def kill_vanilla(flags: argparse.Namespace) -> dict[str, Any]:
    version = VERSIONS[1]
    with tempfile.TemporaryDirectory(prefix="workshop-") as output:
        process = start(version, flags.workers, output, settings(flags, output, 50, version))
        for line in process.stdout or ():
            if _EPOCH.search(line):
                break
        workers = [child for child in psutil.Process(process.pid).children() if "RANK" in child.environ()]
        workers[-1].send_signal(signal.SIGKILL)
        process.communicate()
        kept = [path.name for path in Path(output).iterdir() if path.suffix == ".pt"]
    return {
        "version": version.name, "what happened": f"it ended with exit code {process.returncode}",
        "next step after": "never", "samples repeated": "", "lost": f"all: {len(kept)} checkpoints",
        "computed for nothing": "all", "weights as if nothing had been": "none",
    }  # fmt: skip


def measure_memory(flags: argparse.Namespace) -> Rows:
    """Bytes of tensors on the worker that holds most; the same ViT, whole, under each strategy."""
    rows = []
    for strategy in ("ddp", "fsdp2", "zero1", "zero2", "zero3"):
        with tempfile.TemporaryDirectory(prefix="workshop-") as storage:
            words = [str(BIN / "keepstep"), "run", "--workers", str(flags.workers), "--strategy", strategy]
            words += ["--storage", storage, "--device", "cpu", str(WORKSHOP / "common" / "memory_probe.py")]
            done = subprocess.run(words, capture_output=True, text=True)
        found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"parameters"')]
        if not found:
            sys.exit(f"{' '.join(words)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        held, peak = (max(each[what] for each in found) for what in ("between_steps", "peak"))
        bytes_each = held / found[0]["parameters"]
        rows.append(
            {
                "strategy": strategy, "workers": flags.workers, "between steps": f"{held / 1e6:.0f} MB",
                "bytes a parameter": f"{bytes_each:.1f}", "at the peak of a step": f"{peak / 1e6:.0f} MB",
            }
        )  # fmt: skip
        print(f"  {rows[-1]}", flush=True)
    return rows


def spread(values: list[float], unit: str) -> str:
    middle = f"{statistics.median(values):.1f} {unit}"
    return middle if len(values) == 1 else f"{middle} [{min(values):.1f}, {max(values):.1f}]"


TABLES: dict[str, tuple[str, Callable[[argparse.Namespace], Rows]]] = {
    "code": ("Lines of code", measure_code),
    "steps": ("What is by hand", measure_steps),
    "training": ("Time, accuracy, speed-up", measure_training),
    "kill": ("A worker is killed", measure_kill),
    "memory": ("Memory a worker", measure_memory),
}


def table(rows: Rows) -> str:
    heads = list(rows[0])
    lines = [heads, ["---"] * len(heads), *([str(row[head]) for head in heads] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=TABLES, default=list(TABLES), help="default: all")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3, help="2 or more: the last is timed (default: %(default)s)")
    parser.add_argument("--limit", type=int, default=2048, help="images (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="of every version (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=WORKSHOP / "results", help="folder (default: %(default)s)")
    flags = parser.parse_args()
    if flags.epochs < 2:
        parser.error("--epochs must be 2 or more: the first one warms up, the last one is timed")
    flags.use_gpu = torch.cuda.device_count() >= flags.workers
    if shutil.which("keepstep", path=str(BIN)) is None:
        parser.error("keepstep is not installed in this environment: pip install 'keepstep[workshop,deepspeed]'")
    flags.output.mkdir(parents=True, exist_ok=True)
    path = flags.output / "tables.json"
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for name in flags.only:
        print(f"{TABLES[name][0]} …", flush=True)
        results[name] = TABLES[name][1](flags)
        path.write_text(json.dumps(results, indent=1) + "\n")
    device = f"{flags.workers} GPUs" if flags.use_gpu else f"{os.cpu_count()} cores, no GPU"
    about = (
        f"Measured on {date.today()}: {device}, Python {platform.python_version()}, torch {torch.__version__}; "
        f"ViT on CIFAR-10, {flags.limit:,} images{'' if flags.use_gpu else ', the small model, a core a process'}; "
        f"{f'median [least, most] of {flags.rounds} rounds' if 'training' in results else 'nothing trained'}. "
        "`python workshop/compare.py` makes this page."
    )
    made = [f"## {TABLES[name][0]}\n\n{table(results[name])}\n" for name in TABLES if name in results]
    (flags.output / "tables.md").write_text("\n".join(["# The versions compared\n", f"{about}\n", *made]))
    print((flags.output / "tables.md").read_text())


if __name__ == "__main__":
    main()
