"""Finds a model's repeated blocks: the units that are sharded, recomputed and compiled one by one."""

from __future__ import annotations

from collections import Counter
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from keepstep.errors import ConfigError


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The model's blocks, outermost first: those it names in `_no_split_modules`, else repeated classes in a list."""
    names = getattr(model, "_no_split_modules", None)
    kinds = set(names) if names else _repeated_kinds(model)
    return [module for module in model.modules() if type(module).__name__ in kinds]


def _repeated_kinds(model: nn.Module) -> set[str]:
    """Classes of which a ModuleList or Sequential, or several of them together, hold two or more."""
    counts: Counter[type[nn.Module]] = Counter()
    for parent in model.modules():
        if isinstance(parent, (nn.ModuleList, nn.Sequential)):
            counts.update(type(child) for child in parent if _is_block(child))
    return {kind.__name__ for kind, count in counts.items() if count > 1}


def _is_block(module: nn.Module) -> bool:
    has_children = next(module.children(), None) is not None
    return (
        has_children
        and not isinstance(module, (nn.ModuleList, nn.Sequential))
        and next(module.parameters(), None) is not None
    )


def checkpoint_activations(model: nn.Module) -> None:
    """Makes each block forget its activations in forward and recompute them in backward."""
    blocks = find_blocks(model)
    if not blocks:
        raise ConfigError(
            f"--activation-checkpointing found no repeated blocks in {type(model).__name__}; name their classes in the "
            'model, as `_no_split_modules = ["Block"]`'
        )
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
