"""A trial's run as a process of its own, which saves and leaves if the trial dies: `python -m keepstep.tune.child`."""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

PARENT = "KEEPSTEP_TRIAL"
"""The environment variable with the process id of the trial."""
_PR_SET_PDEATHSIG = 1


def main() -> None:
    parent = int(os.environ.pop(PARENT))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died before it could be asked for
        sys.exit(1)
    runpy.run_module("keepstep", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
