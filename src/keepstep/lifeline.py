"""What keeps a process from outliving the one that started it; free of torch, so as to hold from the first moment."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from keepstep.job import SUPERVISOR

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """A supervisor that is killed outright takes its workers along: nobody goes on writing into the run folder.

    Linux counts by threads: the end of the thread that started this process is enough.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(os.environ[SUPERVISOR]):  # it died before this could be arranged
        sys.exit("keepstep: the supervisor is gone")
