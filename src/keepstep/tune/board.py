"""Where driver and trials leave word for each other: a trial that waits for its run can be reached in no other way."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Reported:
    """How far a trial's reports have come."""

    reports: int = 0
    step: int = 0
    order: int = 0
    """The copy since which that step counts."""


class Board:
    """An actor of the search's own, small and without a CPU."""

    def __init__(self, reported: dict[int, Reported]) -> None:
        self._reported = dict(reported)
        self._steps: dict[int, int] = {}
        self._stopping = False

    def reported(self, number: int) -> Reported:
        return self._reported.get(number, Reported())

    def report(self, number: int, reported: Reported) -> None:
        self._reported[number] = reported

    def look(self, number: int, step: int) -> bool:
        """A trial says how far its run is, and is told whether to stop."""
        self._steps[number] = step
        return self._stopping

    def ask_to_stop(self) -> None:
        self._stopping = True

    def steps(self) -> dict[int, int]:
        return self._steps
