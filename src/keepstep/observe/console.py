"""The progress display: a live bar on a terminal, plain lines in a file or in CI."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from keepstep.observe.ledger import Ledger

_PLAIN_INTERVAL_S = 10.0
_FIRST_METRICS = 4
_WORTH_TELLING_S = 1.0


def format_metrics(metrics: Mapping[str, Any]) -> str:
    """`loss 1.2345  accuracy 0.61`, the first few."""
    chosen = [(name, value) for name, value in metrics.items() if name not in ("step", "epoch")][:_FIRST_METRICS]
    return "  ".join(f"{printable(name)} {float(value):.4g}" for name, value in chosen)


def printable(text: object) -> str:
    """Something from a file, for a terminal: control characters could rewrite what stands on it."""
    return "".join(letter if letter.isprintable() else "?" for letter in str(text))


class Display:
    """Shows how far the run is. Lines printed through `say` stand above the bar."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)
        self._live = sys.stderr.isatty()  # rich also believes FORCE_COLOR, which notebooks set for logs
        self._bar = Progress(
            TextColumn("step {task.completed:.0f}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[metrics]}", markup=False),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
        )
        self._task = self._bar.add_task("", total=None, metrics="", rate="")
        self._started = False
        self._total: int | None = None
        self._last_line, self._last_step = 0.0, -1
        self._mark: tuple[float, int] | None = None
        self._latest: dict[str, Any] = {}

    def expect(self, total_steps: int | None) -> None:
        self._total = total_steps
        self._bar.update(self._task, total=total_steps)

    def update(self, step: int, epoch: int, metrics: Mapping[str, Any]) -> None:
        self._latest.update(metrics)
        rate = self._rate(step)
        if self._live:
            if not self._started:
                self._bar.start()
                self._started = True
            self._bar.update(self._task, completed=step, metrics=format_metrics(self._latest), rate=rate)
        elif step != self._last_step and (self._line_is_due() or step == self._total):
            self._last_line, self._last_step = time.monotonic(), step
            of = f"/{self._total}" if self._total else ""
            self.say(f"step {step}{of}  epoch {epoch}  {format_metrics(self._latest)}  {rate}".rstrip())

    def _line_is_due(self) -> bool:
        return time.monotonic() - self._last_line >= _PLAIN_INTERVAL_S

    def say(self, text: str, style: str | None = None) -> None:
        self._console.print(text, style=style, markup=False)

    def echo(self, text: str) -> None:
        """Passes on what the script printed."""
        if self._started:
            self._console.print(text, markup=False, end="")
        else:
            sys.stdout.write(text)
            sys.stdout.flush()

    def finish(self, step: int, metrics: Mapping[str, Any], ledger: Ledger) -> None:
        """The last lines of a run that came to its end."""
        self.close()
        self.say(f"keepstep: finished at step {step}  {format_metrics(metrics)}".rstrip(), style="green")
        if ledger.total_s >= _WORTH_TELLING_S:
            self.say(f"keepstep: {ledger.summary()}")

    def close(self) -> None:
        if self._started:
            self._bar.stop()
            self._started = False

    def _rate(self, step: int) -> str:
        now = time.monotonic()
        if self._mark is None or step < self._mark[1]:
            self._mark = (now, step)
            return ""
        seconds, steps = now - self._mark[0], step - self._mark[1]
        return f"{steps / seconds:.1f} steps/s" if seconds > 0.5 and steps else ""
