"""ZeRO on CUDA: precisions, offload to host memory and to a disk, and bitwise resume. One GPU is enough."""

from __future__ import annotations

from pathlib import Path

import pytest

from contract.jobs import Combination, Done, assert_same, command, job
from keepstep.engines import Outcome
from keepstep.folder import RunFolder

deepspeed = pytest.importorskip("deepspeed", reason="needs DeepSpeed")
# DeepSpeed and torch's compiler warn of torch's own deprecations.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

STAGES = ("zero1", "zero2", "zero3")


def losses(storage: Path, name: str, strategy: str, **settings: object) -> list[float]:
    combination = Combination("inprocess", strategy, 1)
    assert job(storage, name, combination, ["--plain"], device="cuda", **settings) is Outcome.FINISHED
    return Done(RunFolder(storage, name)).losses


@pytest.mark.parametrize("strategy", STAGES)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_trains_in_every_precision(tmp_path: Path, strategy: str, precision: str) -> None:
    found = losses(tmp_path, "zero", strategy, precision=precision)
    exact = losses(tmp_path, "exact", "single")
    assert found == pytest.approx(exact, rel=1e-4 if precision == "fp32" else 0.1)


@pytest.mark.parametrize("strategy", STAGES)
def test_offload_and_recomputation_change_nothing(tmp_path: Path, strategy: str) -> None:
    plain = losses(tmp_path, "plain", strategy)
    assert losses(tmp_path, "host", strategy, cpu_offload=True, activation_checkpointing=True) == pytest.approx(plain)


def test_a_fast_disk_changes_nothing(tmp_path: Path) -> None:
    if not deepspeed.ops.__compatible_ops__.get("async_io"):
        pytest.skip("DeepSpeed's async_io needs libaio")
    plain = losses(tmp_path, "plain", "zero3")
    assert losses(tmp_path, "disk", "zero3", nvme_offload=str(tmp_path / "swap")) == pytest.approx(plain)


@pytest.mark.parametrize("strategy", STAGES)
def test_compiled_gives_the_same_losses(tmp_path: Path, strategy: str) -> None:
    eager = losses(tmp_path, "eager", strategy)
    assert losses(tmp_path, "compiled", strategy, compile=True) == pytest.approx(eager, rel=1e-3)


@pytest.mark.parametrize(("strategy", "precision"), [("zero1", "fp16"), ("zero2", "bf16"), ("zero3", "bf16")])
def test_bitwise_the_same_after_kills(tmp_path: Path, strategy: str, precision: str) -> None:
    """The 16-bit weights, their fp32 copies, the moments and the loss scale are all put back."""
    combination = Combination("torchrun", strategy, 1)
    flags = ("--device", "cuda", "--deterministic", "--precision", precision, "--max-failures", "9")
    kills = ["body:7:0", "save:10:0", "validation:16:0"]
    assert command(tmp_path, "calm", combination, [], *flags) == 0
    assert command(tmp_path, "killed", combination, ["--kill", *kills], *flags) == 0
    killed = Done(RunFolder(tmp_path, "killed"))
    assert len(list(killed.folder.path.glob("killed_*"))) == len(kills)
    assert_same(Done(RunFolder(tmp_path, "calm")), killed)
