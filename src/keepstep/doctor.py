"""`keepstep doctor`: what this machine has and lacks for training."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
from collections.abc import Iterator

import psutil
import torch
import torch.distributed as dist

from keepstep import __version__

_OPTIONAL = {
    "pyarrow": "Parquet data (CIFAR-10 recipe)",
    "PIL": "images (CIFAR-10 recipe)",
    "torchdata": "StatefulDataLoader, for iterable data sets with num_workers",
}


def print_report() -> int:
    """Prints a line a finding; returns 0 if training is possible."""
    for mark, text in findings():
        print(f"{mark:>4}  {text}")
    return 0


def findings() -> Iterator[tuple[str, str]]:
    """(ok, lack or note, what was found)."""
    yield "ok", f"keepstep {__version__}, Python {platform.python_version()}, torch {torch.__version__}"
    memory = psutil.virtual_memory()
    total, free = memory.total / 2**30, memory.available / 2**30
    yield "ok", f"{os.cpu_count()} CPU cores, {total:.0f} GiB memory, {free:.0f} GiB of it free"
    yield from _gpus()
    yield from _backends()
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler:
        yield "ok", f"C++ compiler for --compile on the CPU: {compiler}"
    else:
        yield "lack", "no C++ compiler: --compile works on the GPU only; install g++"
    disk = shutil.disk_usage(".").free
    yield ("ok" if disk > 2**30 else "lack"), f"{disk / 2**30:.1f} GiB of disk free in this folder"
    for module, use in _OPTIONAL.items():
        if importlib.util.find_spec(module):
            yield "ok", f"{module}: {use}"
        else:
            yield "note", f"{module} is not installed; needed for {use} only"


def _gpus() -> Iterator[tuple[str, str]]:
    if not torch.cuda.is_available():
        built = torch.version.cuda
        why = f"torch is built for CUDA {built}, but sees no device or driver" if built else "torch is a CPU build"
        yield "note", f"no GPU ({why}); everything runs on the CPU"
        return
    for number in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(number)
        bf16 = "bf16" if torch.cuda.is_bf16_supported() else "no bf16"
        yield "ok", f"GPU {number}: {properties.name}, {properties.total_memory / 2**30:.0f} GiB, {bf16}"


def _backends() -> Iterator[tuple[str, str]]:
    yield ("ok" if dist.is_gloo_available() else "lack"), "gloo, for several workers on CPUs and for saving"
    if torch.cuda.is_available():
        yield ("ok" if dist.is_nccl_available() else "lack"), "NCCL, for several workers on GPUs"
