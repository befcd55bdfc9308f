"""Every worker holds the whole model; gradients are averaged in backward (torch's DistributedDataParallel)."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from keepstep.errors import LoopError
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
        self._called = False
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
        trains = torch.is_grad_enabled() and (self.in_step or self.module.training)
        if self._ddp is None or not trains:
            return self._compute(*args, **kwargs)
        self._called = True
        return self._ddp(*args, **kwargs)

    def check_averaged(self) -> None:
        if self._ddp is None or self._called or all(parameter.grad is None for parameter in self.module.parameters()):
            return
        # DDP averages what passes through its forward; a method of the model, or its weights used directly, do not.
        raise LoopError(
            f"the gradient of {type(self.module).__name__} was made without calling it, so workers have not averaged "
            "it; call the model itself, model(...), and let its forward do the work"
        )

    def gradients_used(self) -> None:
        self._called = False

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
