"""Commands as a person would run them, object stores, and Ray clusters of several nodes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.clusters import OBJECT_STORE, QUICK
from e2e.flaky import FlakyNetwork

BUCKET = "training"
URL = f"s3://{BUCKET}/runs"
Shell = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    """`shell("keepstep", "run", ...)` in an empty folder."""

    def call(program: str, *words: str, timeout: float = 200) -> subprocess.CompletedProcess[str]:
        command = [str(Path(sys.executable).with_name(program)), *words]
        return subprocess.run(
            command, capture_output=True, text=True, cwd=tmp_path, timeout=timeout, env=dict(os.environ)
        )

    return call


@pytest.fixture(scope="session")
def s3_server() -> Iterator[int]:
    """The port of an S3 server."""
    moto_server = pytest.importorskip("moto.server")
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield server.get_host_and_port()[1]
    server.stop()


@pytest.fixture
def bucket(s3_server: int) -> Any:
    """The bucket's objects in the server's memory, by key; empty."""
    from moto.s3.models import s3_backends

    backend = s3_backends["123456789012"]["aws"]
    backend.reset()
    return backend.create_bucket(BUCKET, "us-east-1").keys


@pytest.fixture
def network(s3_server: int, bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FlakyNetwork]:
    """The way to the S3 server, which is good until a test makes it bad; and the environment that names it."""
    network = FlakyNetwork(s3_server)
    environment = {
        "AWS_ENDPOINT_URL": network.url,
        "AWS_ACCESS_KEY_ID": "somebody",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "KEEPSTEP_CACHE": str(tmp_path / "cache"),
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    yield network
    network.stop()


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A head without room for workers; tests add nodes."""
    from ray.cluster_utils import Cluster

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": OBJECT_STORE, "_system_config": QUICK}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    yield cluster
    cluster.shutdown()
    for number, handler in before.items():
        signal.signal(number, handler)
