"""Options and fixtures for all tests."""

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
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)  # as workers have: sums in another order are other sums


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run tests that take minutes, too")


@pytest.hookimpl(tryfirst=True)  # before xdist looks at the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    skip_slow = pytest.mark.skip(reason="slow: run with --slow")
    skip_gpu = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "slow" in item.keywords and not config.getoption("--slow"):
            item.add_marker(skip_slow)
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(skip_gpu)
        # Side by side (-n 2 --dist loadgroup) go files; and one process has all tests of Ray, and so one Ray.
        uses_ray = item.get_closest_marker("ray") is not None or "ray_address" in getattr(item, "fixturenames", ())
        item.add_marker(pytest.mark.xdist_group("ray" if uses_ray else str(item.path)))


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No test inherits a worker's place from outside, or leaves one behind."""
    before = dict(os.environ)
    for name in list(os.environ):
        if name.startswith(("KEEPSTEP_JOB", "KEEPSTEP_TARGET", "TORCHELASTIC_")) or name in (
            "RANK",
            "WORLD_SIZE",
            "LOCAL_RANK",
            "RAY_ADDRESS",
            "KEEPSTEP_RAY_ADDRESS",
        ):
            monkeypatch.delenv(name)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield
    for name in set(os.environ) - set(before):
        del os.environ[name]


@pytest.fixture(scope="session")
def ray_address() -> Iterator[str]:
    """Where a Ray of the tests' own is, with 8 CPUs; it is connected to by whoever wants it, and by nobody else."""
    pytest.importorskip("ray")
    folder = tempfile.mkdtemp(prefix="keepstep_ray_", dir="/tmp")  # short: it holds sockets
    port, agent_port, grpc_port, metrics_port = _free_ports(4)
    words = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--temp-dir={folder}"]
    words += [f"--port={port}", "--include-dashboard=false"]
    words += [f"--dashboard-agent-listen-port={agent_port}", f"--dashboard-agent-grpc-port={grpc_port}"]
    words += [f"--metrics-export-port={metrics_port}", "--num-cpus=8", "--object-store-memory=200000000"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    # Where a user once made a token, `ray start` would ask for it, and a plain `ray.init(address)` would not show it.
    environment["RAY_AUTH_MODE"] = "disabled"
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
