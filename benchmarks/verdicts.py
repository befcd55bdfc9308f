"""Injects faults into small trainings and scores the verdicts: precision and recall, and sound runs left alone.

    python benchmarks/verdicts.py                     # 44 faulty runs and 20 sound ones, about 25 minutes on 2 cores
    python benchmarks/verdicts.py --only deadlock     # one kind
    python benchmarks/verdicts.py --jobs 6            # six runs at a time, where there are cores for them

Every run is drawn from the seed: its fault, strength, step, worker, strategy, engine and model. A verdict is right if
it is of the fault's kind and names its worker, where one has it; every other verdict is a false one.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from measure import write_report

_SCRIPT = Path(__file__).with_name("faulty_loop.py")
_EXPECTED = {
    "loader": ("stall",),
    "rank": ("straggler",),
    "rank-loader": ("straggler",),
    "skip": ("hang", "mismatch"),
    "deadlock": ("hang",),
    "spin": ("hang",),
    "leak": ("leak",),
    "nan-data": ("loss",),
    "nan-layer": ("loss",),
    "nan-rate": ("loss",),
}
"""Kind of verdict by fault. Workers that leave out a call wait for ever, or gloo notices: either names it."""
_OF_ONE_WORKER = ("rank", "rank-loader", "deadlock", "spin", "leak")
_SECONDS = 14.0
"""What a run's steps take, about."""
_DRAWN = {"loader": 7, "rank": 5, "rank-loader": 3, "skip": 6, "deadlock": 5, "spin": 2, "leak": 7,
          "nan-data": 3, "nan-layer": 4, "nan-rate": 2}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One run."""

    fault: str
    workers: int
    strategy: str
    engine: str
    rank: int
    at: int
    strength: float
    step_ms: float
    jitter: float
    norms: int

    @property
    def words(self) -> list[str]:
        return [
            "run", "--workers", str(self.workers), "--strategy", self.strategy, "--engine", self.engine,
            "--device", "cpu", "--hang-timeout", "4", "--max-failures", "1", "--checkpoint-every", "100",
        ]  # fmt: skip

    @property
    def arguments(self) -> list[str]:
        longer = 1 + self.strength if self.fault in ("loader", "rank", "rank-loader") else 1.0
        steps = round(_SECONDS * 1e3 / (self.step_ms * longer))
        return [
            "--fault", self.fault, "--rank", str(self.rank), "--at", str(self.at), "--strength", f"{self.strength:.2f}",
            "--step-ms", f"{self.step_ms:.1f}", "--jitter", f"{self.jitter:.2f}", "--steps", str(steps // 2 * 2),
            "--norms", str(self.norms), "--once",
        ]  # fmt: skip


def draw(fault: str, rng: random.Random) -> Case:
    needs_two = fault in ("rank", "rank-loader", "skip") or (fault in ("none", "deadlock") and rng.random() < 0.8)
    workers = 2 if needs_two or rng.random() < 0.5 else 1
    return Case(
        fault=fault,
        workers=workers,
        strategy=rng.choice(["ddp", "ddp", "fsdp2"]) if workers > 1 else "single",
        engine="auto" if workers > 1 else rng.choice(["auto", "torchrun"]),
        rank=rng.randrange(workers),
        at=rng.randrange(30, 120),
        strength={"loader": rng.uniform(0.8, 2.5), "leak": rng.uniform(1.0, 5.0)}.get(fault, rng.uniform(0.7, 2.0)),
        step_ms=rng.uniform(10.0, 25.0),
        jitter=rng.uniform(0.0, 0.3),
        norms=rng.choice([0, 20]),
    )


def verdicts_of(case: Case, storage: Path, name: str) -> tuple[list[dict[str, Any]], str]:
    command = [sys.executable, "-m", "keepstep.cli", *case.words, "--storage", str(storage), "--name", name]
    done = subprocess.run(
        [*command, str(_SCRIPT), *case.arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=180,
    )  # fmt: skip
    events = [json.loads(line) for line in (storage / name / "events.jsonl").read_text().splitlines()]
    return [event for event in events if event["event"] == "verdict"], done.stdout


def is_right(case: Case, verdict: dict[str, Any]) -> bool:
    if verdict["what"] not in _EXPECTED.get(case.fault, ()):
        return False
    return case.fault not in _OF_ONE_WORKER or verdict["rank"] == case.rank


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sound", type=int, default=20, help="sound runs (default: %(default)s)")
    parser.add_argument("--only", choices=("none", *_EXPECTED), help="runs of this kind alone")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    flags = parser.parse_args()
    rng = random.Random(flags.seed)
    cases = [draw(fault, rng) for fault, count in _DRAWN.items() for _ in range(count)]
    cases += [draw("none", rng) for _ in range(flags.sound)]
    rng.shuffle(cases)
    cases = [case for case in cases if flags.only in (None, case.fault)]
    with tempfile.TemporaryDirectory(prefix="keepstep-verdicts-") as storage, ThreadPoolExecutor(flags.jobs) as threads:
        rows = list(threads.map(lambda numbered: judged(*numbered, Path(storage)), enumerate(cases)))
    report(rows, flags)


def judged(number: int, case: Case, storage: Path) -> dict[str, Any]:
    began = time.time()
    found, output = verdicts_of(case, storage, f"run-{number:02}")
    right = [verdict for verdict in found if is_right(case, verdict)]
    wrong = [verdict for verdict in found if not is_right(case, verdict)]
    mark = "ok" if not wrong and (right or case.fault == "none") else "MISSED" if not wrong else "FALSE"
    said = "; ".join(verdict["text"] for verdict in found)[:150]
    took = time.time() - began
    print(f"{number:>3} {case.fault:<12}{case.workers} {case.strategy:<7}{took:5.0f} s  {mark:<7}{said}", flush=True)
    if mark == "MISSED":
        print(output[-1500:], flush=True)
    return {**asdict(case), "named": bool(right), "wrong": [verdict["text"] for verdict in wrong]}


def report(rows: list[dict[str, Any]], flags: argparse.Namespace) -> None:
    print(f"\n{'fault':<14}{'runs':>5}{'named':>7}{'false verdicts':>16}")
    for fault in ("none", *_EXPECTED):
        of_it = [row for row in rows if row["fault"] == fault]
        if of_it:
            false = sum(len(row["wrong"]) for row in of_it)
            named = sum(row["named"] for row in of_it) if fault != "none" else "-"
            print(f"{fault:<14}{len(of_it):>5}{named:>7}{false:>16}")
    faulty = [row for row in rows if row["fault"] != "none"]
    true, false = sum(row["named"] for row in faulty), sum(len(row["wrong"]) for row in rows)
    scores = {"runs": len(rows), "faulty": len(faulty), "named": true, "false": false}
    if faulty:
        scores |= {"precision": true / max(1, true + false), "recall": true / len(faulty)}
        print(f"precision {scores['precision']:.3f}  recall {scores['recall']:.3f}  (seed {flags.seed})")
    if flags.output:
        write_report(flags.output, rows, {"seed": flags.seed, **scores})


if __name__ == "__main__":
    main()
