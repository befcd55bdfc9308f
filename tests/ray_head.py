"""Starts a Ray of the tests' own, and stops it."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def started_ray(**variables: str) -> Iterator[str]:
    """Its address; it has the environment of the tests with these variables."""
    folder = tempfile.mkdtemp(prefix="keepstep_ray_", dir="/tmp")  # short: it holds sockets
    port, agent_port, grpc_port, metrics_port = _free_ports(4)
    words = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--temp-dir={folder}"]
    words += [f"--port={port}", "--include-dashboard=false"]
    words += [f"--dashboard-agent-listen-port={agent_port}", f"--dashboard-agent-grpc-port={grpc_port}"]
    words += [f"--metrics-export-port={metrics_port}", "--num-cpus=8", "--object-store-memory=200000000"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment.update(variables)
    environment["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"] = "0"  # nothing on it is worth waiting for at the end
    with open(Path(folder) / "head.txt", "w") as log:
        head = subprocess.Popen(
            [*words, "--disable-usage-stats"], stdout=log, stderr=log, env=environment, preexec_fn=_end_with_parent
        )
    try:
        address = f"127.0.0.1:{port}"
        _wait_for_ray(head, Path(folder) / "head.txt")
        yield address
    finally:
        head.terminate()  # which stops all that it has started
        try:
            head.wait(30)
        except subprocess.TimeoutExpired:
            head.kill()
            head.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _end_with_parent() -> None:
    """Tests that are killed must not leave a Ray behind."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def _wait_for_ray(head: subprocess.Popen[bytes], log: Path, timeout_s: float = 60) -> None:
    until = time.monotonic() + timeout_s
    while "Ray runtime started" not in log.read_text():
        if head.poll() is not None or time.monotonic() > until:
            pytest.fail(f"no Ray could be started: {log.read_text()}")
        time.sleep(0.2)
