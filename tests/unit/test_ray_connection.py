"""Connecting to a Ray that lets nobody in without its token."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ray_head import started_ray

pytest.importorskip("ray")
pytestmark = pytest.mark.ray

_CONNECT = """
import sys, ray
from keepstep.ray_connection import connect
try:
    connect(sys.argv[1])
    print(f"{len(ray.nodes())} node")
except ConnectionError as error:
    print(error)
"""


def test_a_token_is_shown_to_a_ray_that_asks_for_it(tmp_path: Path) -> None:
    with started_ray(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="a" * 32) as address:
        assert connected(address, tmp_path, RAY_AUTH_TOKEN="a" * 32) == "1 node"
        assert connected(address, tmp_path).startswith("it asks for a token and this user has none: set RAY_AUTH_TOKEN")
        other = connected(address, tmp_path, RAY_AUTH_TOKEN="b" * 32)
        assert other.startswith("it asks for a token and the one that this user has is another")


def test_a_token_is_not_shown_to_a_ray_that_does_not_ask(ray_address: str, tmp_path: Path) -> None:
    assert connected(ray_address, tmp_path, RAY_AUTH_TOKEN="a" * 32) == "1 node"


def connected(address: str, home: Path, **variables: str) -> str:
    """What a process of its own says, which has Ray's settings from here alone: Ray keeps them for a process's life."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, "-c", _CONNECT, address], capture_output=True, text=True, timeout=60,
        env={**environment, "HOME": str(home), **variables},
    )  # fmt: skip
    assert not done.stderr, done.stderr
    return done.stdout.strip()
