"""Which device a worker computes on."""

from __future__ import annotations

import os

import torch

from keepstep.config import StrategyConfig
from keepstep.errors import ConfigError


def choose_device(config: StrategyConfig, local_rank: int, local_world_size: int) -> torch.device:
    """This worker's device: the GPU of its local rank, or the CPU."""
    wanted = config.device
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cpu":
        return torch.device("cpu")
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if num_gpus == 0:
        raise ConfigError("--device cuda, but torch sees no GPU here; `keepstep doctor` says why, --device cpu goes on")
    if local_world_size > num_gpus:
        raise ConfigError(
            f"{local_world_size} workers on this machine, which has {num_gpus} GPU(s); a GPU serves one worker: "
            f"use --workers {num_gpus}, or --device cpu to try it out"
        )
    return torch.device("cuda", local_rank)


def set_arithmetic(config: StrategyConfig) -> None:
    """Process-wide switches for matrix arithmetic and determinism."""
    torch.set_float32_matmul_precision("high" if config.precision in ("tf32", "bf16", "fp16") else "highest")
    torch.backends.cudnn.allow_tf32 = config.precision != "fp32"
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
