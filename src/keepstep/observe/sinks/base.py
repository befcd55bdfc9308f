"""What a sink is, and what it is told of the run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

FINISHED, STOPPED, FAILED = "finished", "stopped", "failed"
"""How a run can end."""


@dataclass(frozen=True)
class About:
    """The run, as a sink knows it."""

    name: str
    folder: Path
    """The run folder."""
    id: str
    """Of this run's series in the sink: the same through all restarts, never another run's."""
    parameters: dict[str, str]
    """Settings and the script's arguments."""
    option: int | None
    """What stood after the sink's name, as in `prometheus:9000`."""
    series: int = 1
    """More than 1: the run lost all its checkpoints and began again, so that there are several values a step."""

    @property
    def title(self) -> str:
        return self.name if self.series == 1 else f"{self.name} ({self.series})"


class Sink(Protocol):
    """One place to send to. All calls come from one thread of its own: they may be slow, and they may raise.

    After an error the sink is thrown away; a new one is opened later, and asked how far the old one got.
    """

    lasting: bool
    """Whether what was sent is still there when this process has gone. If not, it is sent again by the next one."""

    def open(self) -> str:
        """Begins the series `about.id`, or goes on with it; returns where a person can look at it."""
        ...

    def reached(self, noted: dict[str, int]) -> dict[str, int]:
        """Metric → the newest step that the sink really has, after a crash. `noted`: what was noted before it."""
        ...

    def metrics(self, lines: list[dict[str, Any]]) -> None:
        """Sends lines of metrics.jsonl; they are there, or with who outlives this process, when this returns."""
        ...

    def event(self, event: dict[str, Any]) -> None:
        """Shows an event of events.jsonl, if the sink has a place for it."""
        ...

    def close(self, status: str) -> None:
        """The run has ended for now: finished, stopped or failed."""
        ...

    def abandon(self) -> None:
        """Lets go of what is held here, after an error; nothing more is to be sent."""
        ...


def values_of(line: dict[str, Any]) -> dict[str, float]:
    """A line's metrics. NaN and the infinities stand there as strings."""
    return {name: float(value) for name, value in line.items() if name not in ("step", "epoch")}


def words_for(event: dict[str, Any]) -> tuple[str, str] | None:
    """(what kind, what happened) in words, for events that a person wants to see beside the metrics."""
    try:
        return _words_for(event)
    except (KeyError, TypeError):  # not written by keepstep
        return None


def _words_for(event: dict[str, Any]) -> tuple[str, str] | None:
    kind = event["event"]
    if kind == "failed":
        failures = [f"rank {f['rank']} at step {f['step']}: {f['cause']} {f['message']}" for f in event["failures"]]
        return "failure", "; then ".join(failures) + f" ({event['reason']})"
    if kind == "resumed":
        return "resumed", f"from step {event['step']}, with {event['workers']} worker(s)"
    if kind == "checkpoint_passed_over":
        return "checkpoint", f"passed over a bad one: {event['problem']}"
    if kind == "verdict":
        return "verdict", str(event.get("text") or event.get("message") or event)
    return None
