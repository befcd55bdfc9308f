"""What starts the workers: one file an engine, one line here."""

from __future__ import annotations

from importlib import import_module

from keepstep.engines.base import Engine, Launch, Outcome

_ENGINES = {
    "inprocess": "keepstep.engines.inprocess:InProcess",
    "torchrun": "keepstep.engines.torchrun:Torchrun",
    "ray": "keepstep.engines.ray:Ray",
}


def make_engine(name: str) -> Engine:
    """The engine by its name, imported only when used."""
    module, _, attribute = _ENGINES[name].partition(":")
    engine: Engine = getattr(import_module(module), attribute)()
    return engine


__all__ = ["Engine", "Launch", "Outcome", "make_engine"]
