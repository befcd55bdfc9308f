"""Books a launch's time as it goes by: in the ledger, and in the run folder, where it outlives this process."""

from __future__ import annotations

import time
from contextlib import suppress

from keepstep.errors import RunFolderError
from keepstep.folder import RunFolder
from keepstep.observe.ledger import Ledger

_WRITE_S = 2.0


class Accounts:
    """One launch of a run, through all of its attempts."""

    def __init__(self, folder: RunFolder, began: float, writes: bool) -> None:
        """`began`: on the clock of `time.time`; `writes`: whether this machine writes what is written once a run."""
        self._folder, self._writes = folder, writes
        self._closed = Ledger()
        self._began = began
        """The attempt under way."""
        self._attempts = 0
        self._next = 0.0
        if writes:
            self._take_over()

    def _take_over(self) -> None:
        """A launch that was killed could not say where its time went, but for this."""
        left = self._folder.read_ledger()
        if left:
            self._folder.event(
                "ended", outcome="interrupted", step=left.get("step", 0), seconds=left.get("seconds", {})
            )
            self._folder.remove_ledger()

    def close_attempt(self, phases: dict[str, float]) -> None:
        """`phases`: as the attempt's first worker measured them."""
        now = time.time()
        self._closed.add_attempt(phases, now - self._began, after_failure=self._attempts > 0)
        self._began = now
        self._attempts += 1

    @property
    def ledger(self) -> Ledger:
        """Of the attempts that are over."""
        return self._closed

    def so_far(self, phases: dict[str, float]) -> Ledger:
        """With the attempt that is under way."""
        ledger = Ledger(dict(self._closed.seconds))
        ledger.add_attempt(phases, time.time() - self._began, after_failure=self._attempts > 0)
        return ledger

    @property
    def are_due(self) -> bool:
        return self._writes and time.monotonic() >= self._next

    def write(self, phases: dict[str, float], step: int) -> None:
        self._next = time.monotonic() + _WRITE_S
        with suppress(RunFolderError):  # a full disk is said by who must write
            self._folder.write_ledger({"step": step, "seconds": self.so_far(phases).seconds})

    def close(self) -> None:
        """The launch has said where its time went."""
        if self._writes:
            self._folder.remove_ledger()
