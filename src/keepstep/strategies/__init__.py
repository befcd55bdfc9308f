"""How a model is spread over the workers: one file a strategy, one line here."""

from __future__ import annotations

from importlib import import_module

from keepstep.strategies.base import Setup, Strategy

_STRATEGIES = {
    "single": "keepstep.strategies.single:Single",
    "ddp": "keepstep.strategies.ddp:DDP",
    "fsdp": "keepstep.strategies.fsdp:FSDP",
    "fsdp2": "keepstep.strategies.fsdp2:FSDP2",
    "zero1": "keepstep.strategies.deepspeed:Zero1",
    "zero2": "keepstep.strategies.deepspeed:Zero2",
    "zero3": "keepstep.strategies.deepspeed:Zero3",
}


def make_strategy(name: str, setup: Setup) -> Strategy:
    """The strategy by its name. Imported only when used: FSDP alone costs half a second."""
    module, _, attribute = _STRATEGIES[name].partition(":")
    strategy: Strategy = getattr(import_module(module), attribute)(setup)
    return strategy


__all__ = ["Setup", "Strategy", "make_strategy"]
