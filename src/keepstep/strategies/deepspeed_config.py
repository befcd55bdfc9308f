"""The JSON that DeepSpeed is configured by: what the flags say, and the user's own file where it does not conflict."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import nn

from keepstep.config import StrategyConfig
from keepstep.errors import ConfigError
from keepstep.strategies.blocks import find_blocks

_MEGABYTE = 1 << 20
_SMALLEST_BUCKET = 1 << 23  # numbers: 32 MB of fp32, about what ddp sends at a time
_LARGEST_BUCKET = 500_000_000  # DeepSpeed's own
_NOT_HERE = {
    "train_batch_size": "the batch is the DataLoader's batch_size",
    "train_micro_batch_size_per_gpu": "the batch is the DataLoader's batch_size",
    "gradient_accumulation_steps": "the script accumulates, with run.micro(batch, n)",
    "managed_gradient_accumulation": "the script accumulates, with run.micro(batch, n)",
    "optimizer": "the script makes the optimizer and gives it to run.prepare",
    "scheduler": "the script makes the scheduler and gives it to run.prepare",
    "torch_autocast": "the arithmetic is --precision's",
    "amp": "the arithmetic is --precision's",
    "activation_checkpointing": "that is the flag --activation-checkpointing",
    "compile": "that is the flag --compile",
}
"""Settings that keepstep has another place for."""
_OBJECTS = ("aio", "comms_logger", "csv_monitor", "flops_profiler", "tensorboard", "wandb")
"""Settings, beside those of the flags, that DeepSpeed stumbles over unless they are objects."""


def deepspeed_config(config: StrategyConfig, stage: int) -> dict[str, Any]:
    """The whole of it."""
    own = _of_flags(config, stage)
    if config.deepspeed_config is None:
        return own
    return _merged(own, _read(Path(config.deepspeed_config)), "")


def _of_flags(config: StrategyConfig, stage: int) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage}
    if config.cpu_offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
        if stage == 3:
            zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    if config.nvme_offload is not None:
        zero["offload_optimizer"] = {"device": "nvme", "nvme_path": config.nvme_offload, "pin_memory": True}
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,  # it wants to know one; nothing depends on it
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,  # backward adds up, step is where it ends: PyTorch's own way
        "gradient_clipping": 0.0,  # DeepSpeed's default is 1.0, and nobody asked for it
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": config.precision == "bf16"},
        # As torch's GradScaler does it, so that a run can change between the two.
        "fp16": {
            "enabled": config.precision == "fp16",
            "initial_scale_power": 16,
            "loss_scale_window": 2000,
            "hysteresis": 1,
        },
    }
    return settings


def sized_for(config: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """The same, but that DeepSpeed gathers and reduces about a block at a time, as fsdp2 does.

    Its own sizes are for models of billions: a buffer of 5e8 numbers is more than all that is divided of a small one.
    What the user's file says stays.
    """
    blocks = (sum(p.numel() for p in block.parameters()) for block in find_blocks(model))
    bucket = min(max([_SMALLEST_BUCKET, *blocks]), _LARGEST_BUCKET)
    sizes = {"reduce_bucket_size": bucket}
    if config["zero_optimization"]["stage"] == 3:
        sizes |= {
            "stage3_prefetch_bucket_size": bucket,
            "stage3_max_live_parameters": 2 * bucket,
            "stage3_max_reuse_distance": bucket,
        }
    return {**config, "zero_optimization": {**sizes, **config["zero_optimization"]}}


def keeping_gradients(config: dict[str, Any], largest_parameter: int, world_size: int) -> dict[str, Any]:
    """The same, but that gradients stay in memory where the optimizer's state lies on a disk.

    DeepSpeed 0.19 loses the others as soon as it puts one gradient there, and trains on, wrongly. It puts there what
    is larger than a block: so a block is made larger than a worker's part of any gradient.
    """
    if config["zero_optimization"].get("offload_optimizer", {}).get("device") != "nvme":
        return config
    gradient_bytes = 4 * -(-largest_parameter // world_size)
    block = (gradient_bytes // _MEGABYTE + 1) * _MEGABYTE
    aio = config.get("aio", {})
    return {**config, "aio": {**aio, "block_size": max(block, aio.get("block_size", 0))}}


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"--deepspeed-config {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"--deepspeed-config {path} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(
            f"--deepspeed-config {path} holds a {type(found).__name__}; DeepSpeed's settings are an object"
        )
    for key, value in found.items():
        if key in _NOT_HERE and value != "auto":
            raise ConfigError(f"--deepspeed-config sets {key}, but {_NOT_HERE[key]}; take it out of the file")
        if key in _OBJECTS and value != "auto" and not isinstance(value, dict):
            raise ConfigError(f"--deepspeed-config sets {key} to {_short(value)}; an object is expected there")
    return found


def refusal(error: Exception) -> ConfigError:
    """What DeepSpeed says of its settings, in one line: pydantic's report has many, and a link."""
    found = error.errors() if hasattr(error, "errors") else []
    problems = [f"{'.'.join(map(str, one['loc']))} is {_short(one['input'])}: {one['msg']}" for one in found[:3]]
    said = "; ".join(problems) or " ".join(str(error).split())
    return ConfigError(f"DeepSpeed refuses the settings of --deepspeed-config: {said[:500]}")


def _short(value: object) -> str:
    text = json.dumps(value, default=repr)
    return text if len(text) <= 80 else text[:77] + "..."


def _merged(own: dict[str, Any], theirs: dict[str, Any], where: str) -> dict[str, Any]:
    merged = dict(own)
    for key, value in theirs.items():
        if value == "auto":  # as other trainers' files have it: whatever the flags say
            continue
        if isinstance(value, dict) and isinstance(own.get(key), dict):
            merged[key] = _merged(own[key], value, f"{where}{key}.")
        elif isinstance(value, dict) != isinstance(own.get(key), dict) and key in own:
            wanted = "an object" if isinstance(own[key], dict) else "no object"
            raise ConfigError(f"--deepspeed-config sets {where}{key} to {_short(value)}; {wanted} is expected there")
        elif f"{where}{key}" in ("zero_optimization.stage", "bf16.enabled", "fp16.enabled") and value != own[key]:
            flag = "--strategy" if key == "stage" else "--precision"
            raise ConfigError(
                f"--deepspeed-config sets {where}{key} to {json.dumps(value)}, {flag} to {json.dumps(own[key])}; "
                f"change {flag} or take it out of the file"
            )
        else:
            merged[key] = value
    return merged
