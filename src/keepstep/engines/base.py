"""What every engine does: start the workers, start them again while the supervisor says so, and say how it ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Protocol

from keepstep.config import LaunchConfig
from keepstep.failure import WorkerFailure
from keepstep.folder import RunFolder
from keepstep.job import Target
from keepstep.observe.hang import Request
from keepstep.observe.recovery import Death


class Outcome(Enum):
    """How a launch ended."""

    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True)
class Launch:
    """Everything an engine needs. Knows nothing of models and strategies."""

    config: LaunchConfig
    target: Target
    device: str
    """Which kind of device workers want: auto, cpu or cuda."""
    folder: RunFolder
    before_attempt: Callable[[], None]
    """Called before workers are started, each time."""
    on_failure: Callable[[list[WorkerFailure], Death], bool]
    """Called with an attempt's failures, and when they came; True: try again."""
    watch: Callable[[], Request | None]
    """Called a few times a second while workers run; what it asks for is to be done to all of them."""
    say: Callable[[str], None]
    """Tells the user something, beside the progress."""
    asked_to_stop: Callable[[], bool]
    """Whether the workers are to save and leave; those on this machine have been told."""
    hearts: Path
    """Where the workers' heartbeats are looked for; an engine whose workers live elsewhere brings them here."""


class Engine(Protocol):
    """Runs a launch to its end."""

    def run(self, launch: Launch) -> Outcome: ...
