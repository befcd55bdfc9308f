"""Weights, gradients and optimizer state sharded by torch's first FSDP (`FullyShardedDataParallel`)."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from keepstep.errors import ConfigError
from keepstep.strategies.base import PreparedModel, Scaler, Setup, Strategy
from keepstep.strategies.blocks import find_blocks
from keepstep.strategies.forward import Inner
from keepstep.strategies.fsdp2 import broadcast_from_rank0, sharding_mesh

_WRAPPER = "_fsdp_wrapped_module."
_INNER = "model."


class FSDPModel(PreparedModel):
    def __init__(self, module: nn.Module, setup: Setup) -> None:
        broadcast_from_rank0(module)
        super().__init__(module, setup)
        self._layout: dict[str, Any] | None = None
        kinds = {type(block) for block in find_blocks(module)}
        half = setup.half
        mesh = sharding_mesh(setup)
        self._fsdp = FullyShardedDataParallel(
            Inner(module, self._original),
            auto_wrap_policy=ModuleWrapPolicy(kinds) if kinds else None,
            device_id=setup.device,
            mixed_precision=MixedPrecision(param_dtype=half, reduce_dtype=torch.float32) if half else None,
            cpu_offload=CPUOffload(offload_params=True) if setup.config.cpu_offload else None,
            sharding_strategy=ShardingStrategy.HYBRID_SHARD if mesh.ndim == 2 else ShardingStrategy.FULL_SHARD,
            use_orig_params=True,  # the optimizer's groups keep their meaning
            device_mesh=mesh,
        )
        # As under fsdp2: FSDP's own flat memory says nothing to anybody.
        self._complete_state_dict(lambda state: state.update(self.state()))

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        return self._fsdp(*args, **kwargs)

    @contextmanager
    def no_gradient_sync(self) -> Iterator[None]:
        with self._fsdp.no_sync():
            yield

    def clip_grad_norm(self, max_norm: float, norm_type: float) -> torch.Tensor:
        norm: torch.Tensor = self._fsdp.clip_grad_norm_(max_norm, norm_type)
        return norm

    def named_parameters(self) -> dict[str, nn.Parameter]:
        named = self.module.named_parameters(remove_duplicate=False)
        return {name.replace(_WRAPPER, ""): parameter for name, parameter in named}

    def state(self) -> dict[str, Any]:
        with self._sharded():
            state = self._fsdp.state_dict()
        return {name.removeprefix(_INNER): value for name, value in state.items()}

    def load_state(self, state: dict[str, Any]) -> None:
        with self._sharded():
            self._fsdp.load_state_dict({_INNER + name: value for name, value in state.items()})

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
        with self._sharded():
            whole = FullyShardedDataParallel.optim_state_dict(self._fsdp, optimizer)
        return {name.removeprefix(_INNER): state for name, state in whole["state"].items()}

    def optimizer_target(
        self, optimizer: torch.optim.Optimizer, name: str, what: str, shape: torch.Size, dtype: torch.dtype
    ) -> Any:
        if self._layout is None:
            self._layout = self.state()  # once for all of the optimizer's tensors: it is not cheap
        weight = self._layout[name]
        return torch.empty_like(weight, dtype=dtype) if weight.shape == shape else torch.empty(shape, dtype=dtype)

    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        self._layout = None
        named = {_INNER + name: value for name, value in state.items()}
        groups = [{"params": list(named)}]
        with self._sharded():
            local = FullyShardedDataParallel.optim_state_dict_to_load(
                self._fsdp, optimizer, {"state": named, "param_groups": groups}
            )
        # What comes back is keyed by the optimizer's own numbering; the caller works by name.
        numbered = [p for group in optimizer.param_groups for p in group["params"]]
        names = {parameter: name for name, parameter in self.named_parameters().items()}
        return {names[numbered[number]]: value for number, value in local["state"].items()}

    @contextmanager
    def _sharded(self) -> Iterator[None]:
        """Within, state dicts hold this worker's shards."""
        configs = (StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(), ShardedOptimStateDictConfig())
        with warnings.catch_warnings():
            # FSDP1 warns of its successor at every turn; it has no other API of its own.
            warnings.simplefilter("ignore", FutureWarning)
            with FullyShardedDataParallel.state_dict_type(self._fsdp, *configs):
                yield


class FSDP(Strategy):
    name = "fsdp"
    needs_process_group = True
    collective_forward = True
    narrows_weights = True

    def check(self) -> None:
        super().check()
        if self.setup.world_size == 1 and self.setup.config.cpu_offload:
            raise ConfigError("--strategy fsdp with 1 worker shards and offloads nothing; fsdp2 offloads with 1, too")

    def wrap(self, module: nn.Module) -> PreparedModel:
        if self.setup.world_size == 1:
            return PreparedModel(module, self.setup)  # FSDP1 would wrap it, warn, and shard nothing
        return FSDPModel(module, self.setup)

    def gradient_scaler(self) -> Scaler | None:
        return ShardedGradScaler(self.setup.device.type) if self.setup.config.precision == "fp16" else None
