"""The search's one display: a line for what happened to a trial, and on a terminal a bar with what goes on now."""

from __future__ import annotations

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from keepstep.observe.console import Display, printable
from keepstep.tune.domain import Value
from keepstep.tune.journal import FAILED, Record
from keepstep.tune.report import best_first
from keepstep.tune.search import Search


def format_values(values: dict[str, Value]) -> str:
    return "  ".join(f"{name}={value}" for name, value in values.items())


class SearchDisplay(Display):
    """Counts trials instead of steps."""

    def __init__(self, search: Search, records: dict[int, Record]) -> None:
        super().__init__()
        self._search, self._records = search, records
        self._bar = Progress(
            TextColumn("{task.completed:.0f}/{task.total:.0f} trials"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[state]}", markup=False),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
        )
        self._task = self._bar.add_task("", total=len(records), state="")

    def started(self, record: Record) -> None:
        goes_on = f" goes on after {len(record.reports)} reports" if record.reports else ""
        self.say(f"{self._search.run_name(record.number)}{goes_on}  {format_values(record.values)}")

    def copied(self, record: Record) -> None:
        assert record.copy is not None
        donor = self._search.run_name(record.copy.donor)
        self.say(f"{self._search.run_name(record.number)} becomes a copy of {donor}, {format_values(record.values)}")

    def ended(self, record: Record) -> None:
        value = "" if record.value is None else f"  {self._search.metric} {record.value:.4g}"
        best = "  the best so far" if best_first(self._search, self._records.values())[0] is record else ""
        reason = f": {printable(record.reason)}" if record.reason else ""
        text = f"{self._search.run_name(record.number)} {record.status} at step {record.step}{reason}{value}{best}"
        self.say(text, style="red" if record.status == FAILED else None)

    def tick(self, steps: dict[int, int]) -> None:
        """What goes on now; on a terminal only."""
        if not self._live:
            return
        if not self._started:
            self._bar.start()
            self._started = True
        still = [(number, step) for number, step in sorted(steps.items()) if not self._records[number].is_over]
        running = [f"{number:04d} step {step}" for number, step in still]
        shown = running if len(running) <= 4 else [*running[:3], f"{len(running) - 3} more"]
        over = sum(record.is_over for record in self._records.values())
        self._bar.update(self._task, completed=over, state=", ".join(shown) + self._best())

    def _best(self) -> str:
        """The best so far."""
        first = best_first(self._search, self._records.values())[0]
        return "" if first.value is None else f"  best {self._search.metric} {first.value:.4g} ({first.number:04d})"
