"""Options and fixtures for all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from ray_head import started_ray

torch.set_num_threads(1)  # as workers have: sums in another order are other sums


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run tests that take minutes, too")


@pytest.hookimpl(tryfirst=True)  # before xdist looks at the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    skip_slow = pytest.mark.skip(reason="slow: run with --slow")
    skip_gpu = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        uses_ray = item.get_closest_marker("ray") is not None or "ray_address" in getattr(item, "fixturenames", ())
        if "slow" in item.keywords and not config.getoption("--slow"):
            item.add_marker(skip_slow)
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(skip_gpu)
        # Side by side (-n 2 --dist loadgroup) go files; and one process has all tests of Ray, and so one Ray.
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
    # Where a user once made a token, `ray start` would ask for it, and a plain `ray.init(address)` would not show it.
    with started_ray(RAY_AUTH_MODE="disabled") as address:
        yield address
