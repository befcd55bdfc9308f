"""Every worker holds the whole model; gradients are averaged in backward (torch's DistributedDataParallel)."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from keepstep.strategies.base import PreparedModel, Setup, Strategy
from keepstep.strategies.forward import ReversedInner

# Renamed in torch 2.13.
_OPTIONS = inspect.signature(DistributedDataParallel).parameters
_NO_BUFFERS: dict[str, Any] = {
    "forward_sync_buffers" if "forward_sync_buffers" in _OPTIONS else "broadcast_buffers": False
}


class DDPModel(PreparedModel):
    def __init__(self, module: nn.Module, setup: Setup) -> None:
        super().__init__(module, setup)
        self._ddp: DistributedDataParallel | None = None
        if any(parameter.requires_grad for parameter in module.parameters()):
            self._ddp = DistributedDataParallel(
                ReversedInner(module, self._compute),
                device_ids=[setup.device] if setup.device.type == "cuda" else None,
                **_NO_BUFFERS,  # see BufferSync
                gradient_as_bucket_view=True,
            )
            # After its first backward DDP lays its buckets out anew, by the order in which gradients came. A resumed
            # run would make its first step in another layout than the run that it continues; and with three workers
            # or more, where a gradient lies decides in which order it is summed. So the layout is fixed beforehand.
            self._ddp.reducer._push_all_rebuilt_params()

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        # Evaluation has no gradient to average, and must not depend on the other workers calling as often.
        if self._ddp is None or not torch.is_grad_enabled() or not self.module.training:
            return self._compute(*args, **kwargs)
        return self._ddp(*args, **kwargs)

    @contextmanager
    def no_gradient_sync(self) -> Iterator[None]:
        if self._ddp is None:
            yield
            return
        with self._ddp.no_sync():
            yield


class DDP(Strategy):
    name = "ddp"
    needs_process_group = True

    def wrap(self, module: nn.Module) -> PreparedModel:
        return DDPModel(module, self.setup)
