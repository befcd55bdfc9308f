"""Compares two contenders in pairs on a machine that is never quiet, and reports what was found."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Spread:
    """The middle of some numbers, and how far they lie apart."""

    median: float
    p10: float
    p90: float
    count: int
    low: float
    """The median itself lies between `low` and `high`, with 95% confidence, whatever the numbers' distribution."""
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        cuts = statistics.quantiles(values, n=10, method="inclusive") if len(values) > 1 else [values[0]] * 9
        ordered, count = sorted(values), len(values)
        reach = 0.98 * count**0.5  # of the ranks around the middle: a sign test turned round
        low, high = ordered[max(0, int(count / 2 - reach))], ordered[min(count - 1, int(count / 2 + reach))]
        return cls(statistics.median(values), cuts[0], cuts[-1], count, low, high)

    def show(self, unit: str = "", digits: int = 3) -> str:
        return f"{self.median:.{digits}f}{unit} [{self.p10:.{digits}f}, {self.p90:.{digits}f}]"


@dataclass
class Row:
    """One line of the table: keepstep against what it is measured by."""

    name: str
    baseline: str
    """What it is compared with, in words."""
    ratio: Spread
    """Of the pairs' ratios, contender / baseline."""
    target: float | None
    """The ratio that keepstep promises to stay under."""
    seconds: dict[str, Spread]
    """Each contender's own times."""
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        if self.target is None:
            return "-"
        if self.ratio.median <= self.target:
            return "met"
        return "MISSED" if self.ratio.low > self.target else "unclear"


def paired(baseline: Callable[[], float], contender: Callable[[], float], pairs: int) -> list[tuple[float, float]]:
    """Runs both `pairs` times, in the order ABBA: a slow drift of the machine then falls on both alike."""
    found = []
    for number in range(pairs):
        if number % 2:
            second = contender()
            found.append((baseline(), second))
        else:
            first = baseline()
            found.append((first, contender()))
    return found


def compare(name: str, names: tuple[str, str], pairs: Sequence[tuple[float, float]], target: float | None) -> Row:
    """The row for pairs of (baseline, contender) seconds."""
    columns = {names[0]: Spread.of([a for a, _ in pairs]), names[1]: Spread.of([b for _, b in pairs])}
    return Row(name, names[0], Spread.of([b / a for a, b in pairs]), target, columns)


def timed(work: Callable[[], Any], device: torch.device) -> float:
    """Seconds that `work` takes, the GPU's part included."""
    synchronize(device)
    began = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - began


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def print_table(rows: Sequence[Row]) -> None:
    print(f"\n{'what':<34} {'ratio: median [p10, p90]':<26} {'95% of median':<16} {'target':>6}  {'':<7} {'pairs':>5}")
    for row in rows:
        target = f"{row.target:.4g}" if row.target is not None else "-"
        sure = f"{row.ratio.low:.3f} to {row.ratio.high:.3f}"
        print(f"{row.name:<34} {row.ratio.show():<26} {sure:<16} {target:>6}  {row.verdict:<7} {row.ratio.count:>5}")
    for row in rows:
        print(f"\n{row.name}")
        for contender, spread in row.seconds.items():
            print(f"  {contender:<32} {spread.show(' s', 4)}")
        for note, value in row.notes.items():
            print(f"  {note:<32} {value}")


def write_json(path: Path, rows: Sequence[Row], settings: dict[str, Any]) -> None:
    write_report(path, [{**asdict(row), "verdict": row.verdict} for row in rows], settings)


def write_report(path: Path, rows: Sequence[dict[str, Any]], settings: dict[str, Any]) -> None:
    machine = {"platform": platform.platform(), "cores": os.cpu_count(), "load": os.getloadavg()}
    machine |= {"torch": torch.__version__, "python": platform.python_version()}
    if torch.cuda.is_available():
        machine["gpu"] = torch.cuda.get_device_name()
    report = {"settings": settings, "machine": machine, "rows": rows}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n")
    print(f"\nwritten: {path}")
