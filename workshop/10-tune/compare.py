"""Compares searches over the learning rate: same accuracies at the same rates, same best, and what stopping saved.

    python compare.py output/ray-grid output/runs/grid output/ray-asha output/runs/asha

The first is what the others are compared with. Exit code 1: they differ.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

Trial = dict[str, Any]


def read_search(folder: str | Path) -> dict[float, Trial]:
    """The trials of a search of tune_ray.py or `keepstep tune` by their learning rate, best first."""
    path = Path(folder) / "tune.json"
    if not path.is_file():
        sys.exit(f"{path} is not there: search first, with tune_ray.py or keepstep tune")
    trials = json.loads(path.read_text())["trials"]
    for trial in trials:
        trial["accuracies"] = [report[1] if isinstance(report, list) else report for report in trial["reports"]]
        trial["steps_made"] = _steps_made(path.parent, trial)
    if not any(trial["accuracies"] for trial in trials):
        sys.exit(f"no trial of {path} has come to an accuracy")
    return {trial["values"]["lr"]: trial for trial in trials}


def _steps_made(folder: Path, trial: Trial) -> int:
    """A run of keepstep trains on until the word comes that it is to stop: its own record has every step."""
    if "run" not in trial:
        step: int = trial["step"]
        return step
    result = folder.parent / trial["run"] / "result.json"
    return json.loads(result.read_text())["step"] if result.is_file() else 0


def differences(first: dict[float, Trial], second: dict[float, Trial], relative: float = 1e-5) -> list[str]:
    """What two searches disagree about: the best rate, and any epoch's accuracy that both have measured."""
    found = []
    for lr in first.keys() & second.keys():
        # A trial that was stopped early has fewer epochs: those that both have must agree.
        for epoch, pair in enumerate(zip(first[lr]["accuracies"], second[lr]["accuracies"], strict=False)):
            if not math.isclose(*pair, rel_tol=relative):
                found.append(f"lr {lr:g}, epoch {epoch}: accuracy {pair[0]:.6f} and {pair[1]:.6f}")
    best = [next(iter(search)) for search in (first, second)]
    if best[0] != best[1]:
        found.append(f"the best lr is {best[0]:g} in one and {best[1]:g} in the other")
    return sorted(found)


def num_steps(search: dict[float, Trial]) -> int:
    return sum(trial["steps_made"] for trial in search.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("searches", nargs="+", type=Path, help="folders with tune.json")
    searches = {str(folder): read_search(folder) for folder in parser.parse_args().searches}
    first = next(iter(searches.values()))
    agree = True
    print(f"{'search':<20} {'best lr':>8} {'accuracy':>9} {'trials':>7} {'stopped':>8} {'steps':>6} {'saved':>6}")
    for name, search in searches.items():
        best, stopped = next(iter(search)), sum(trial["status"] == "stopped early" for trial in search.values())
        saved = 1 - num_steps(search) / num_steps(first)
        print(f"{name:<20} {best:>8g} {search[best]['accuracy']:>9.2%} {len(search):>7} {stopped:>8} "
              f"{num_steps(search):>6} {saved:>6.0%}")  # fmt: skip
        for difference in differences(first, search):
            agree = False
            print(f"  differs: {difference}")
    print("same best rate, same accuracies at every epoch that both have" if agree else "they differ")
    sys.exit(0 if agree else 1)


if __name__ == "__main__":
    main()
