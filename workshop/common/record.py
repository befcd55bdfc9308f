"""Writes what a training gave, a line an epoch, so that versions of the same lesson can be compared."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any


class Record:
    """One per training, on rank 0: prints each epoch and appends it to OUTPUT/metrics.jsonl."""

    def __init__(self, output: str, resumed: bool = False) -> None:
        self.path = Path(output) / "metrics.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not resumed:
            self.path.unlink(missing_ok=True)
        self._began = time.perf_counter()

    def epoch(self, epoch: int, train_loss: float, test_loss: float, accuracy: float, **more: Any) -> None:
        """`accuracy`: of the whole test set, whatever this worker has seen of it."""
        seconds = time.perf_counter() - self._began
        self._began = time.perf_counter()
        print(
            f"epoch {epoch}: train loss {train_loss:.4f}, test loss {test_loss:.4f}, accuracy {accuracy:.2%}, "
            f"{seconds:.1f} s",
            flush=True,
        )
        line = {"epoch": epoch, "train_loss": train_loss, "test_loss": test_loss, "accuracy": accuracy}
        # An epoch that a crash has undone is trained again, and then counts once.
        kept = [each for each in read(self.path.parent) if each["epoch"] < epoch] if self.path.exists() else []
        lines = [json.dumps(each) for each in (*kept, line | {"seconds": seconds} | more)]
        self.path.write_text("\n".join(lines) + "\n")


def read(output: str | Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(output) / "metrics.jsonl").read_text().splitlines()]


def read_run(folder: str | Path, num_samples: int, batch_size: int) -> list[dict[str, Any]]:
    """The same of a keepstep run's folder, where metrics.jsonl has a line a step, and one after each epoch's test.

    `num_samples`: of the training set, whose last batch may be smaller than the others and counts for less.
    """
    rows: list[dict[str, Any]] = []
    losses: list[float] = []
    for line in map(json.loads, (Path(folder) / "metrics.jsonl").read_text().splitlines()):
        if "train_loss" in line:
            losses.append(line["train_loss"])
        else:
            sizes = [min(batch_size, num_samples - done) for done in range(0, num_samples, batch_size)]
            total = sum(loss * size for loss, size in zip(losses, sizes, strict=True))
            rows.append({"epoch": line["epoch"], "train_loss": total / num_samples,
                         "test_loss": line["test_loss"], "accuracy": line["accuracy"]})  # fmt: skip
            losses = []
    return rows
