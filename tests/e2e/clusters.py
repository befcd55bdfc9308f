"""Runs on Ray clusters of several nodes, which are processes of this machine: `cluster` in conftest.py makes them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from contract.jobs import SCRIPT
from keepstep.folder import RunFolder

# Ray looks for room once a while, and notices a lost node late: a test has less patience.
_COMMAND = (
    "from keepstep.engines import ray; ray._RESIZE_S = 2.0; from keepstep.cli import main; raise SystemExit(main())"
)
QUICK = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 2}
OBJECT_STORE = 80_000_000
"""Bytes: nearly the least that Ray takes."""
PLAIN = ["--plain", "--epochs", "40"]


def add_node(cluster: Any, cpus: int, **settings: Any) -> Any:
    return cluster.add_node(num_cpus=cpus, object_store_memory=OBJECT_STORE, **settings)


def start(cluster: Any, storage: Path, *flags: str, arguments: list[str] = PLAIN) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", _COMMAND, "run", "--engine", "ray", "--address", cluster.address, "--device", "cpu"]
    words += ["--storage", str(storage), "--name", "a", "--checkpoint-every", "5", "--keep", "100", *flags]
    return subprocess.Popen(
        [*words, SCRIPT.name, *arguments], cwd=SCRIPT.parent, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def wait_for_step(storage: Path, step: int, run: subprocess.Popen[str], timeout_s: float = 90) -> None:
    metrics = RunFolder(storage, "a").metrics
    until = time.monotonic() + timeout_s
    while not (metrics.exists() and f'"step": {step}' in metrics.read_text()):
        assert time.monotonic() < until, f"step {step} never came"
        assert run.poll() is None, run.communicate()[0]
        time.sleep(0.1)


def finish(run: subprocess.Popen[str]) -> str:
    output, _ = run.communicate(timeout=200)
    assert run.returncode == 0, output
    assert "Traceback" not in output and "raylet" not in output, output
    return output
