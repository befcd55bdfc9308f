"""What was asked for on the command line."""

from __future__ import annotations

from dataclasses import dataclass

from keepstep.errors import ConfigError


@dataclass(frozen=True)
class Request:
    """The flags of `keepstep predict`."""

    name: str
    """Of the run."""
    data: str
    output: str
    script: str
    storage: str = "runs"
    checkpoint: str = "newest"
    model: str = "model"
    keep: str | None = None
    """Input columns to write beside the predictions, with commas between; None: all that are single values."""
    batch_size: int = 256
    workers: int = 1
    address: str | None = None
    device: str = "auto"

    def __post_init__(self) -> None:
        for flag, number in (("--batch-size", self.batch_size), ("--workers", self.workers)):
            if number < 1:
                raise ConfigError(f"{flag} is {number}; at least 1 is needed")


@dataclass(frozen=True)
class Task:
    """What whoever predicts must know, in this process or on another machine."""

    data: str
    output: str
    script: str
    storage: str
    name: str
    step: int
    model: str
    device: str
    batch_size: int
    keep: tuple[str, ...]
