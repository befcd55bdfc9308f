"""`make demo`, as a newcomer sees it."""

from __future__ import annotations

import time

from e2e.conftest import Shell


def test_demo_kills_recovers_and_compares(shell: Shell) -> None:
    began = time.time()
    done = shell("keepstep", "demo")
    assert done.returncode == 0, done.stdout + done.stderr
    assert time.time() - began < 120
    assert "the losses are bitwise equal, every one of them" in done.stdout
    assert "rank 1 at step" in done.stderr and "SIGKILL" in done.stderr
    assert "recovering from failures" in done.stdout
