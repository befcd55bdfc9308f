"""`keepstep doctor` tells what this machine has and lacks, and what to do about it."""

from __future__ import annotations

import collections
import importlib.util
import shutil
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from keepstep import __version__, doctor


def texts(mark: str) -> list[str]:
    return [text for found, text in doctor.findings() if found == mark]


def test_the_report_is_a_line_a_finding(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.print_report() == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(list(doctor.findings())) >= 6
    assert all(line[:4].strip() in ("ok", "lack", "note") and line[4:6] == "  " for line in lines)
    assert f"keepstep {__version__}" in lines[0] and torch.__version__ in lines[0]


@pytest.mark.parametrize(("compiler", "mark"), [("/usr/bin/g++", "ok"), (None, "lack")])
def test_a_compiler_is_looked_for(monkeypatch: pytest.MonkeyPatch, compiler: str | None, mark: str) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: compiler)
    (text,) = (text for text in texts(mark) if "C++ compiler" in text)
    assert "install g++" in text if compiler is None else compiler in text


@pytest.mark.parametrize(("free", "mark"), [(2**31, "ok"), (2**29, "lack")])
def test_little_room_on_the_disk_is_a_lack(monkeypatch: pytest.MonkeyPatch, free: int, mark: str) -> None:
    usage = collections.namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(2**40, 0, free))
    assert f"{free / 2**30:.1f} GiB of disk free in this folder" in texts(mark)


def test_a_package_that_is_not_installed_is_a_note_that_says_what_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torchdata" else object())
    (text,) = (text for text in texts("note") if "torchdata" in text)
    assert "is not installed; needed for StatefulDataLoader" in text
    assert any(found.startswith("pyarrow: ") for found in texts("ok"))


@pytest.mark.parametrize(("built_for", "why"), [(None, "torch is a CPU build"), ("12.8", "sees no device or driver")])
def test_without_a_gpu_it_says_why(monkeypatch: pytest.MonkeyPatch, built_for: str | None, why: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", built_for)
    (text,) = (text for text in texts("note") if "no GPU" in text)
    assert why in text and "everything runs on the CPU" in text
    assert not any("NCCL" in text for _, text in doctor.findings())


def test_gpus_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    def properties(number: int) -> Any:
        return SimpleNamespace(name=f"H{number}", total_memory=80 * 2**30)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert [t for t in texts("ok") if t.startswith("GPU")] == ["GPU 0: H0, 80 GiB, bf16", "GPU 1: H1, 80 GiB, bf16"]
    assert "NCCL, for several workers on GPUs" in texts("lack")
