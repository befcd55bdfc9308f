"""Flags that change how a model runs: they must run under every strategy, and compute the same thing."""

from __future__ import annotations

from pathlib import Path

import pytest

from contract.jobs import Combination, Done, job
from keepstep.engines import Outcome
from keepstep.folder import RunFolder

_ALONE = Combination("inprocess", "single", 1)
_STRATEGIES = [
    _ALONE,
    *(Combination("torchrun", strategy, 2) for strategy in ("ddp", "fsdp", "fsdp2", "zero3")),
    pytest.param(Combination("torchrun", "zero1", 2), marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    storage = tmp_path_factory.mktemp("exact")
    return losses(storage, _ALONE)


def losses(storage: Path, combination: Combination, **settings: object) -> list[float]:
    assert job(storage, "run", combination, ["--plain", "--epochs", "2"], **settings) is Outcome.FINISHED
    return Done(RunFolder(storage, "run")).losses


@pytest.mark.parametrize("combination", _STRATEGIES, ids=str)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_sixteen_bits(tmp_path: Path, exact: list[float], combination: Combination, precision: str) -> None:
    if precision == "fp16" and combination.strategy.startswith("zero"):
        pytest.skip("DeepSpeed has no fp16 on the CPU; tests/gpu has it")
    found = losses(tmp_path, combination, precision=precision)
    assert found == pytest.approx(exact, rel=0.05)
    assert found != exact  # it did compute in 16 bits


@pytest.mark.parametrize("combination", _STRATEGIES, ids=str)
def test_recomputed_activations(tmp_path: Path, exact: list[float], combination: Combination) -> None:
    assert losses(tmp_path, combination, activation_checkpointing=True) == pytest.approx(exact, rel=1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("combination", _STRATEGIES, ids=str)
def test_compiled(tmp_path: Path, exact: list[float], combination: Combination) -> None:
    assert losses(tmp_path, combination, compile=True) == pytest.approx(exact, rel=1e-4)
