"""Weights, gradients and optimizer state sharded block by block (torch's `fully_shard`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from keepstep.strategies.base import PreparedModel, Scaler, Setup, Strategy
from keepstep.strategies.blocks import find_blocks


def sharding_mesh(setup: Setup) -> DeviceMesh:
    """All workers in one line; with several nodes, sharded within a node and replicated between them (HSDP)."""
    if 1 < setup.local_world_size < setup.world_size:
        shape = (setup.world_size // setup.local_world_size, setup.local_world_size)
        return init_device_mesh(setup.device.type, shape, mesh_dim_names=("replicate", "shard"))
    return init_device_mesh(setup.device.type, (setup.world_size,))


def broadcast_from_rank0(module: nn.Module) -> None:
    """Sharding keeps each worker's part of its own weights: they must be the same before it."""
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.detach(), src=0)


def _precision(setup: Setup) -> tuple[MixedPrecisionPolicy, MixedPrecisionPolicy]:
    """The policies of blocks and of the whole model: 16 bits in between, fp32 for gradients' sums and at the end."""
    if setup.half is None:
        return MixedPrecisionPolicy(), MixedPrecisionPolicy()
    inner = MixedPrecisionPolicy(param_dtype=setup.half, reduce_dtype=torch.float32)
    return inner, replace(inner, output_dtype=torch.float32)


class FSDP2Model(PreparedModel):
    def __init__(self, module: nn.Module, setup: Setup) -> None:
        broadcast_from_rank0(module)
        inner, outer = _precision(setup)
        options: dict[str, Any] = {
            "mesh": sharding_mesh(setup),
            "offload_policy": CPUOffloadPolicy() if setup.config.cpu_offload else OffloadPolicy(),
        }
        blocks = find_blocks(module)
        for block in reversed(blocks):  # innermost first, as fully_shard wants
            if setup.config.compile:
                block.compile()
            fully_shard(block, mp_policy=inner, **options)
        fully_shard(module, mp_policy=outer, **options)
        self._has_blocks = bool(blocks)
        super().__init__(module, setup)

    def _compiled(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        # Blocks are compiled one by one: a graph over all of them would break at each gathering of weights.
        return forward if self._has_blocks else super()._compiled(forward)

    def _compute(self, *args: Any, **kwargs: Any) -> Any:
        return self._original(*args, **kwargs)  # the mixed-precision policy does what autocast would

    @contextmanager
    def no_gradient_sync(self) -> Iterator[None]:
        assert isinstance(self.module, FSDPModule)
        self.module.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.module.set_requires_gradient_sync(True)


class FSDP2(Strategy):
    name = "fsdp2"
    needs_process_group = True
    collective_forward = True
    narrows_weights = True

    def wrap(self, module: nn.Module) -> PreparedModel:
        return FSDP2Model(module, self.setup)

    def gradient_scaler(self) -> Scaler | None:
        return ShardedGradScaler(self.setup.device.type) if self.setup.config.precision == "fp16" else None
