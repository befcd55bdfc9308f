"""`run.prepare`: sorts models, optimizers, schedulers and loaders, and makes each ready for all workers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from keepstep.context import Context
from keepstep.data.loader import Loader
from keepstep.data.ray_data import RayData
from keepstep.data.ray_source import Joined
from keepstep.errors import ConfigError
from keepstep.observe.heart import Heart
from keepstep.seeding import mix
from keepstep.state import TrainingState
from keepstep.strategies.forward import hold_of
from keepstep.strategies.optimizer import PreparedOptimizer

Evaluating = Callable[[], AbstractContextManager[None]]
"""What stands around a pass over a loader that is not a training pass."""


def prepare(
    objects: tuple[Any, ...], context: Context, state: TrainingState, heart: Heart, evaluating: Evaluating
) -> tuple[Any, ...]:
    """The objects, ready, in the order given; each is entered into `state`."""
    fresh: dict[str, nn.Module] = {}
    for thing in objects:
        if isinstance(thing, nn.Module) and hold_of(thing) is None:
            fresh[TrainingState.next_name("model", state.models | fresh)] = thing
    optimizers = [_add_optimizer(thing, state) for thing in objects if isinstance(thing, torch.optim.Optimizer)]
    # Optimizers hold on to parameters that sharding replaces: they are noted by name before, and reconnected after.
    named = {name: model.named_parameters() for name, model in state.models.items()}
    named |= {name: dict(module.named_parameters()) for name, module in fresh.items()}
    for optimizer in optimizers:
        optimizer.remember_names(named)
    for name, module in fresh.items():
        state.models[name] = context.strategy.prepare(module)
    for optimizer in optimizers:
        optimizer.reconnect(state.models)
    context.strategy.join({name: state.models[name] for name in fresh}, optimizers)
    return tuple(_prepared(thing, context, state, heart, evaluating) for thing in objects)


def _add_optimizer(optimizer: torch.optim.Optimizer, state: TrainingState) -> PreparedOptimizer:
    prepared = PreparedOptimizer(optimizer, state.scaler)
    state.optimizers[TrainingState.next_name("optimizer", state.optimizers)] = prepared
    return prepared


def _prepared(thing: Any, context: Context, state: TrainingState, heart: Heart, evaluating: Evaluating) -> Any:
    if isinstance(thing, (nn.Module, torch.optim.Optimizer, Loader)):
        return thing
    if isinstance(thing, (DataLoader, RayData)):
        seed, number = context.config.folder.seed, len(state.loaders)
        loader = Loader(
            Joined(thing, context.collective, f"{context.nonce}-{number}") if isinstance(thing, RayData) else thing,
            mix(seed, number) if number else seed,  # two loaders must not be shuffled alike
            context.rank,
            context.world_size,
            context.device,
            heart=heart,
            evaluating=evaluating,
            even_calls=context.strategy.collective_forward,
            uneven_shares=context.config.launch.is_elastic,
        )
        state.loaders[TrainingState.next_name("loader", state.loaders)] = loader
        return loader
    if hasattr(thing, "step") and hasattr(thing, "optimizer") and hasattr(thing, "state_dict"):
        state.schedulers[TrainingState.next_name("scheduler", state.schedulers)] = thing
        return thing
    raise ConfigError(
        f"run.prepare(...) got a {type(thing).__name__}; it takes models, optimizers, learning-rate schedulers and "
        "DataLoaders or keepstep.RayData (run.track keeps anything else that has a state_dict)"
    )
