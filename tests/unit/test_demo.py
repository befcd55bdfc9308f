"""Whom `keepstep demo` kills."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from keepstep import demo
from keepstep.job import JOB
from keepstep.observe.heart import Heart


def test_the_worker_is_found_where_a_standby_has_its_environment(tmp_path: Path) -> None:
    Heart(tmp_path / "rank_1").beat(70)  # this process is the worker
    job = json.dumps({"name": "demo-killed", "hearts": str(tmp_path)})
    waits = [sys.executable, "-c", "input()"]
    with subprocess.Popen(waits, env={**os.environ, "RANK": "1", JOB: job}, stdin=subprocess.PIPE) as standby:
        pulse = demo._pulse("demo-killed", rank=1)
        assert pulse is not None and (pulse.pid, pulse.step) == (os.getpid(), 70)
        assert demo._pulse("demo-calm", rank=1) is None
        standby.kill()
