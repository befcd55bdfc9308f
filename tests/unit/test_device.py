"""Which device a worker gets, and what is said where there is none for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from keepstep.config import StrategyConfig
from keepstep.device import choose_device, set_arithmetic
from keepstep.errors import ConfigError


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many GPUs torch sees."""
    count = [0]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count[0] > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count[0])
    return count


@pytest.fixture
def _arithmetic_put_back() -> Iterator[None]:
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark
    deterministic = torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark = before[1:]
    torch.use_deterministic_algorithms(deterministic)


@pytest.mark.parametrize(
    ("wanted", "count", "expected"),
    [("auto", 0, "cpu"), ("auto", 4, "cuda:2"), ("cuda", 4, "cuda:2"), ("cpu", 4, "cpu")],
)
def test_a_worker_gets_the_gpu_of_its_local_rank(gpus: list[int], wanted: str, count: int, expected: str) -> None:
    gpus[0] = count
    assert str(choose_device(StrategyConfig(device=wanted), 2, 4)) == expected


def test_a_gpu_that_is_not_there_is_said_so(gpus: list[int]) -> None:
    with pytest.raises(ConfigError) as error:
        choose_device(StrategyConfig(device="cuda"), 0, 1)
    assert "torch sees no GPU here" in str(error.value)
    assert "`keepstep doctor` says why, --device cpu goes on" in str(error.value)


def test_more_workers_than_gpus_are_refused(gpus: list[int]) -> None:
    gpus[0] = 2
    with pytest.raises(
        ConfigError, match=r"4 workers on this machine, which has 2 GPU\(s\).*use --workers 2, or --device"
    ):
        choose_device(StrategyConfig(), 0, 4)


@pytest.mark.usefixtures("_arithmetic_put_back")
@pytest.mark.parametrize(("precision", "matmul"), [("fp32", "highest"), ("tf32", "high"), ("bf16", "high")])
def test_fp32_means_fp32(precision: str, matmul: str) -> None:
    set_arithmetic(StrategyConfig(precision=precision))
    assert torch.get_float32_matmul_precision() == matmul
    assert torch.backends.cudnn.allow_tf32 is (precision != "fp32")


@pytest.mark.usefixtures("_arithmetic_put_back")
def test_deterministic_kernels_are_asked_for() -> None:
    set_arithmetic(StrategyConfig(deterministic=True))
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.backends.cudnn.benchmark
