"""How long it took from a worker's death to the next step, by phase: marks of the supervisor's, then of a worker's."""

from __future__ import annotations

import time
from dataclasses import astuple, dataclass
from itertools import pairwise

from keepstep.job import Job

PHASES = ("detect", "tear_down", "start", "import", "rendezvous", "load", "first_step")
"""detect: until the death was seen; at most, where only the last sign of life is known. tear_down: until the other
workers had gone. start: until the next were launched. import: until the script called `keepstep.start`. rendezvous:
until the workers had met. load: until the model was built and the checkpoint read. first_step: until one was made."""


@dataclass(frozen=True)
class Death:
    """When a worker died, was found dead, and the others had gone."""

    died: float
    seen: float
    gone: float
    """When the last of the others had ended."""


class Recovery:
    """One worker's way back to work."""

    def __init__(self, job: Job | None, began: float) -> None:
        """Called when the workers have met; `began`: when the script called `keepstep.start`."""
        self._marks: list[float] = []
        if job is not None and job.death is not None:
            self._marks = [*job.death, job.launched, began]
            self.mark()

    def mark(self) -> None:
        """Another phase is through."""
        if self._marks:
            self._marks.append(time.time())

    def seconds(self) -> dict[str, float] | None:
        """By phase, once a step is made; None where nothing was lost."""
        self.mark()
        if len(self._marks) != len(PHASES) + 1:
            return None
        lengths = (max(0.0, after - before) for before, after in pairwise(self._marks))  # clocks of two machines
        return {phase: round(length, 3) for phase, length in zip(PHASES, lengths, strict=True)}


def marks(death: Death) -> tuple[float, ...]:
    """For the job."""
    return astuple(death)


def describe(seconds: dict[str, float]) -> str:
    shown = ", ".join(f"{phase} {seconds[phase]:.2f}" for phase in PHASES)
    return f"recovered in {sum(seconds.values()):.1f} s: {shown}"
