"""Where a run's time went, over all of its attempts."""

from __future__ import annotations

from dataclasses import dataclass, field

from keepstep.observe.heart import PHASES

LINES = {
    "step": "training",
    "data": "waiting for data",
    "transfer": "copying to the device",
    "validation": "validation",
    "checkpoint": "blocked by checkpoints",
    "start": "starting up",
    "recovery": "recovering from failures",
    "replay": "repeating lost steps",
    "idle": "outside of the loop",
}
"""Ledger entries, in the order they are shown, and what they mean."""


@dataclass
class Ledger:
    """Seconds by what they were spent on. They add up to the wall time."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(LINES, 0.0))

    def add_attempt(self, phases: dict[str, float], wall_s: float, after_failure: bool) -> None:
        """One attempt's phases, as its rank 0 measured them. What the worker did not see was start-up, or recovery."""
        entry = "recovery" if after_failure else "start"
        for phase in PHASES:
            if phase != "start":
                self.seconds[phase] += phases.get(phase, 0.0)
        seen = sum(value for phase, value in phases.items() if phase != "start")
        self.seconds[entry] += max(0.0, wall_s - seen)

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float:
        """The share of the time that made new steps."""
        return self.seconds["step"] / self.total_s if self.total_s else 0.0

    def summary(self) -> str:
        """`12.3 s: 71% training, 12% starting up, …`, the largest first."""
        total = self.total_s or 1.0
        largest = sorted(self.seconds.items(), key=lambda item: -item[1])
        shares = [f"{seconds / total:.0%} {LINES[entry]}" for entry, seconds in largest if seconds >= 0.01 * total]
        return f"{self.total_s:.1f} s: {', '.join(shares)}"

    def lines(self) -> list[str]:
        """A line an entry that took time, as `training  12.3 s  71%`."""
        total = self.total_s or 1.0
        return [
            f"{label:<26}{self.seconds[entry]:8.1f} s {100 * self.seconds[entry] / total:5.1f}%"
            for entry, label in LINES.items()
            if self.seconds[entry] >= 0.05
        ]
