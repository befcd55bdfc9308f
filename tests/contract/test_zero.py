"""What ZeRO does its own way, against DDP: clipping, accumulation by hand, several optimizers' kinds, its JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from contract.jobs import Done
from keepstep.engines import Outcome
from keepstep.folder import RunFolder
from keepstep.job import Target
from keepstep.supervisor import supervise

_SCRIPT = Path(__file__).with_name("zero_train.py")
STAGES = ("zero1", "zero2", "zero3")


def run(storage: Path, strategy: str, *arguments: str, workers: int = 2, **settings: object) -> Outcome:
    chosen = {"name": strategy, "storage": str(storage), "strategy": strategy, "workers": workers, "device": "cpu"}
    return supervise({**chosen, "max_failures": 0, **settings}, Target(str(_SCRIPT), arguments)).outcome


def metrics(storage: Path, strategy: str, *arguments: str, **settings: object) -> list[dict]:
    assert run(storage, strategy, *arguments, **settings) is Outcome.FINISHED
    return Done(RunFolder(storage, strategy)).metrics


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(("--optimizer", "SGD", "--clip", "0.05", "--by-hand", "2"), marks=pytest.mark.slow),
        pytest.param(("--optimizer", "Adagrad", "--by-hand", "3"), marks=pytest.mark.slow),
        ("--frozen", "--tied", "--discard"),
    ],
    ids=" ".join,
)
def test_the_same_as_ddp(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    expected = metrics(tmp_path, "ddp", *arguments)
    for stage in STAGES:
        found = metrics(tmp_path, stage, *arguments)
        for line, wanted in zip(found, expected, strict=True):
            assert line == pytest.approx(wanted, rel=1e-5), stage


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zero3", "zero2", "fsdp2"])
def test_a_buffer_of_32_bits_meets_weights_of_16(tmp_path: Path, strategy: str) -> None:
    bf16 = {"precision": "bf16", "checkpoint_every": "3"}
    expected = [line["loss"] for line in metrics(tmp_path, "ddp", "--buffer", **bf16)]
    found = metrics(tmp_path, strategy, "--buffer", **bf16)
    assert [line["loss"] for line in found] == pytest.approx(expected, rel=0.03)
    assert run(tmp_path / "killed", strategy, "--buffer", "--die-at", "5", **bf16) is Outcome.FAILED
    assert metrics(tmp_path / "killed", strategy, "--buffer", **bf16) == found


def test_a_deepspeed_file_is_merged(tmp_path: Path) -> None:
    """Also: a bucket that is smaller than what goes into it changes nothing."""
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": {"reduce_bucket_size": 20}, "gradient_clipping": 0.05}))
    expected = metrics(tmp_path, "ddp", "--clip", "0.05")
    found = metrics(tmp_path, "zero2", deepspeed_config=str(file))
    assert [line["loss"] for line in found] == pytest.approx([line["loss"] for line in expected], rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--optimizer", "Adafactor"), "Adafactor looks at whole tensors"),
        (("--two-models",), "takes one model with one optimizer"),
        (("--closure",), "optimizer.step(closure) is not possible under ZeRO"),
    ],
    ids=["optimizer", "models", "closure"],
)
def test_what_it_cannot_do_it_says(
    tmp_path: Path, arguments: tuple[str, ...], says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "zero2", *arguments) is Outcome.FAILED
    assert says in capfd.readouterr().err


def test_a_setting_that_deepspeed_refuses_is_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": {"reduce_bucket_size": "big"}}))
    assert run(tmp_path, "zero2", workers=1, deepspeed_config=str(file)) is Outcome.FAILED
    (line,) = (line for line in capfd.readouterr().err.splitlines() if line.startswith("keepstep: "))
    assert 'refuses the settings of --deepspeed-config: reduce_bucket_size is "big": Input should be' in line


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_whose_state_lies_on_a_disk_is_saved_and_resumed(tmp_path: Path) -> None:
    """Slow: DeepSpeed compiles its disk access for minutes, once a machine."""
    deepspeed = pytest.importorskip("deepspeed")
    if not deepspeed.ops.__compatible_ops__.get("async_io"):
        pytest.skip("needs libaio and a C++ compiler")
    wide = ("--width", "800")  # below a megabyte DeepSpeed leaves a tensor in memory
    expected = metrics(tmp_path / "memory", "zero3", *wide)
    disk = {"nvme_offload": str(tmp_path / "swap"), "checkpoint_every": "3"}
    assert run(tmp_path / "disk", "zero3", *wide, "--die-at", "5", **disk) is Outcome.FAILED
    assert list((tmp_path / "swap").rglob("*.swp"))
    assert metrics(tmp_path / "disk", "zero3", *wide, **disk) == expected
    assert [event["step"] for event in Done(RunFolder(tmp_path / "disk", "zero3")).events("resumed")] == [3]
