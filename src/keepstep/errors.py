"""Every exception a user can see: each says what was found, what was expected and what to do."""

from __future__ import annotations


class KeepstepError(Exception):
    """A mistake or a limit that trying again cannot mend: shown as one line, never retried."""

    title = "error"


class ConfigError(KeepstepError):
    """A flag, or a combination of flags, that cannot work."""

    title = "configuration"


class DataError(KeepstepError):
    """Data that is missing, or a loader that cannot be resumed or split."""

    title = "data"


class LoopError(KeepstepError):
    """A training loop that does not keep to the rules that make exact resume possible."""

    title = "training loop"


class CheckpointError(KeepstepError):
    """A checkpoint that cannot be written, or that belongs to something else."""

    title = "checkpoint"


class CheckpointUnreadable(CheckpointError):
    """A checkpoint that may well be good, but cannot be read now or by this version: no reason to do without it."""


class RunFolderError(KeepstepError):
    """A run folder that cannot be used: taken by another process, unreadable, full."""

    title = "run folder"


class StorageError(KeepstepError):
    """An object store that does not do what it is asked, after every reasonable try."""

    title = "storage"


class ScriptRefused(KeepstepError):
    """A script that ended before its first step, saying why: `sys.exit("data.csv has no column label")`."""

    title = "script"


class RunFailed(KeepstepError):
    """The workers failed and the failure budget is spent; raised by `keepstep.launch`."""

    title = "run failed"


class NotFinite(RuntimeError):
    """The loss is no number any more, nor are the weights. Another attempt finds out where that began."""

    def __init__(self, step: int, message: str) -> None:
        super().__init__(message)
        self.step = step
        """The step in which it was."""


EXIT_FAILED = 1
"""The script or a worker failed."""
EXIT_USAGE = 2
"""Bad input: nothing was started or nothing was lost."""
EXIT_STOPPED = 75
"""Stopped on request after saving: start the same command again to go on (sysexits' EX_TEMPFAIL)."""


class Stopped(SystemExit):
    """The run was asked to stop (SIGTERM, Ctrl-C), has saved, and unwinds the user's loop.

    Not an `Exception`, so that a user's `except Exception` cannot swallow a pre-emption.
    """

    def __init__(self) -> None:
        super().__init__(EXIT_STOPPED)
