"""Turns fingerprints on, in a worker whose job says so; in all others nothing of them is even imported."""

from __future__ import annotations

from typing import TYPE_CHECKING

from keepstep.context import Context
from keepstep.folder import RunFolder
from keepstep.job import Job
from keepstep.state import TrainingState

if TYPE_CHECKING:
    from keepstep.fingerprints.writer import Fingerprints


def watch_calls(rank: int) -> None:
    """Before the script is imported: it may take `time` of the module `time` with it."""
    job = Job.from_environment()
    if job is not None and job.fingerprints:
        from keepstep.fingerprints.suspects import install
        from keepstep.fingerprints.writer import FOLDER

        install(RunFolder(job.settings["storage"], job.name).path / FOLDER, rank)


def begin_fingerprints(context: Context, state: TrainingState) -> Fingerprints | None:
    if context.job is None or not context.job.fingerprints:
        return None
    from keepstep.fingerprints.writer import Fingerprints

    return Fingerprints(context, state)
