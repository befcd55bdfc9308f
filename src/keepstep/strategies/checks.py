"""What can be known of a strategy's flags without a worker: said before anything is started."""

from __future__ import annotations

from keepstep.config import StrategyConfig
from keepstep.errors import ConfigError


def check_flags(config: StrategyConfig, world_size: int, device: str | None) -> None:
    """Raises where the flags cannot work. `device`: which kind the workers will have, if that is known."""
    name = config.resolved_strategy(world_size)
    if name.startswith("zero"):
        from keepstep.strategies.deepspeed_config import deepspeed_config

        deepspeed_config(config, stage=int(name.removeprefix("zero")))  # reads the file, and merges it
    if device is not None:
        check_device(name, config, device)


def check_device(strategy: str, config: StrategyConfig, device: str) -> None:
    """Raises where that kind of device cannot do what the flags ask."""
    if device != "cpu":
        return
    if config.cpu_offload:
        raise ConfigError("--cpu-offload moves state from the GPU to the host; this run is on the CPU already")
    if strategy.startswith("zero") and config.precision == "fp16":
        raise ConfigError(f"--strategy {strategy} --precision fp16 needs a GPU: DeepSpeed has no fp16 on the CPU")
