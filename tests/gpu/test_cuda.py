"""What only a GPU can show: precisions, compilation, offload, and bitwise resume on CUDA. One GPU is enough."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from contract.jobs import Combination, Done, assert_same, command, job
from keepstep.engines import Outcome
from keepstep.errors import ConfigError
from keepstep.folder import RunFolder

# torch's own compiler warns of torch's own deprecations.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

_STRATEGIES = ("single", "ddp", "fsdp", "fsdp2")


def losses(storage: Path, name: str, combination: Combination, **settings: object) -> list[float]:
    assert job(storage, name, combination, ["--plain"], device="cuda", **settings) is Outcome.FINISHED
    return Done(RunFolder(storage, name)).losses


@pytest.mark.parametrize("strategy", _STRATEGIES)
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
def test_trains_in_every_precision(tmp_path: Path, strategy: str, precision: str) -> None:
    found = losses(tmp_path, "gpu", Combination("inprocess", strategy, 1), precision=precision)
    exact = losses(tmp_path, "cpu", Combination("inprocess", "single", 1))
    assert all(math.isfinite(loss) for loss in found)
    tolerance = 0.1 if precision in ("bf16", "fp16") else 1e-2
    assert found == pytest.approx(exact, rel=tolerance)


@pytest.mark.parametrize("strategy", _STRATEGIES)
def test_compiled_gives_the_same_losses(tmp_path: Path, strategy: str) -> None:
    eager = losses(tmp_path, "eager", Combination("inprocess", strategy, 1))
    compiled = losses(tmp_path, "compiled", Combination("inprocess", strategy, 1), compile=True)
    assert compiled == pytest.approx(eager, rel=1e-3)


def test_offload_and_recomputation_change_nothing(tmp_path: Path) -> None:
    plain = losses(tmp_path, "plain", Combination("inprocess", "fsdp2", 1))
    saving = losses(
        tmp_path, "saving", Combination("inprocess", "fsdp2", 1), cpu_offload=True, activation_checkpointing=True
    )
    assert saving == pytest.approx(plain, rel=1e-4)


@pytest.mark.parametrize(
    "combination", [Combination("inprocess", "single", 1), Combination("torchrun", "fsdp2", 1)], ids=str
)
def test_bitwise_the_same_after_kills(tmp_path: Path, combination: Combination) -> None:
    """Dropout on the GPU included: its generator is restored, too."""
    flags = ("--device", "cuda", "--deterministic", "--precision", "bf16", "--max-failures", "9")
    kills = ["body:7:0", "save:10:0", "validation:16:0"]
    assert command(tmp_path, "calm", combination, [], *flags) == 0
    codes = [command(tmp_path, "killed", combination, ["--kill", *kills], *flags)]
    while codes[-1] == -9 and len(codes) < 5:
        codes.append(command(tmp_path, "killed", combination, ["--kill", *kills], *flags))
    assert codes[-1] == 0
    killed = Done(RunFolder(tmp_path, "killed"))
    assert len(list(killed.folder.path.glob("killed_*"))) == len(kills)
    assert_same(Done(RunFolder(tmp_path, "calm")), killed)


def test_more_workers_than_gpus_are_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    outcome = job(tmp_path, "many", Combination("torchrun", "ddp", 9), device="cuda")
    assert outcome is Outcome.FAILED
    assert "a GPU serves one worker" in capfd.readouterr().err


def test_offload_is_refused_where_it_moves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--cpu-offload works with"):
        job(tmp_path, "single", Combination("inprocess", "single", 1), device="cuda", cpu_offload=True)
