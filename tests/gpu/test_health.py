"""Faults on CUDA: a leak on the device, a hang under NCCL, a loss that is no number."""

from __future__ import annotations

from pathlib import Path

import pytest

from e2e.test_health import QUICK, run, verdicts
from keepstep.folder import RunFolder

pytestmark = pytest.mark.gpu
CUDA = ["--device", "cuda", "--workers", "1"]
NCCL = [*CUDA, "--engine", "torchrun", "--strategy", "ddp"]


def test_a_leak_on_the_device_is_named(tmp_path: Path) -> None:
    code, output, events = run(tmp_path, CUDA, ["--fault", "leak", "--strength", "20", "--steps", "800"])
    assert code == 0, output
    assert verdicts(events) == [("leak", 0)] and "device memory of rank 0 grows" in output


def test_a_hang_under_nccl_is_stopped_and_got_over(tmp_path: Path) -> None:
    fault = ["--fault", "deadlock", "--at", "50", "--once", "--steps", "120", *QUICK]
    code, output, events = run(tmp_path, [*NCCL, "--hang-timeout", "3"], fault)
    assert code == 0, output
    assert verdicts(events) == [("hang", 0)] and "hangs in the step phase of step 50" in output


@pytest.mark.parametrize("flags", [CUDA, NCCL], ids=["single", "nccl"])
def test_the_first_tensor_that_is_no_number_is_found(tmp_path: Path, flags: list[str]) -> None:
    code, output, _ = run(tmp_path, flags, ["--fault", "nan-layer", "--at", "50", "--steps", "3000", *QUICK])
    assert code == 1, output
    assert "in step 50, is the output of '3' (Root)" in output


def test_a_sound_run_is_left_alone_and_copies_are_booked(tmp_path: Path) -> None:
    code, output, events = run(tmp_path, NCCL, ["--steps", "900"])
    assert code == 0, output
    assert verdicts(events) == []
    assert RunFolder(tmp_path, "a").read_result()["seconds"]["transfer"] > 0
