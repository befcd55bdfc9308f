"""One model's weights in a checkpoint, under the names and in the type they leave by; read a few at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from keepstep.checkpoint.contents import Contents
from keepstep.checkpoint.files import Layout, nbytes
from keepstep.checkpoint.tree import Tensors, is_tensor
from keepstep.errors import CheckpointError

_READ_AT_ONCE = 1 << 24
"""Bytes of small tensors that are read together: each reading opens the checkpoint's files."""


class Weights:
    """What `load_state_dict` of the bare model takes. A tied weight is there under each of its names."""

    def __init__(
        self, contents: Contents, model: str = "model", dtype: torch.dtype | None = None, strip_prefix: str = ""
    ) -> None:
        self._reader, self._dtype = contents.reader, dtype
        state = _state_of(contents, model)
        # A module's extra state may be anything; a safetensors file holds tensors only.
        self.left_out = sorted(name for name, value in state.items() if not is_tensor(value))
        names = _stripped([name for name in state if is_tensor(state[name])], strip_prefix)
        self._keys = {new: str(state[old]["key"]) for new, old in names.items()}
        self.layout: Layout = {name: self._described(key) for name, key in self._keys.items()}
        self.infinite: list[str] = []
        """Tensors that were finite, and hold values beyond the range of the type they were cast to."""

    def stream(self, names: Iterable[str]) -> Iterator[torch.Tensor]:
        """The tensors, in this order; only a few of them are in memory at any time."""
        group: list[str] = []
        size = 0
        for name in names:
            more = nbytes(*self._reader.shape_and_dtype(self._keys[name])[::-1])
            if group and size + more > _READ_AT_ONCE:
                yield from self._load(group)
                group, size = [], 0
            group.append(name)
            size += more
        yield from self._load(group)

    def _load(self, names: list[str]) -> Iterator[torch.Tensor]:
        targets: Tensors = {}
        for name in names:
            shape, dtype = self._reader.shape_and_dtype(self._keys[name])
            targets[self._keys[name]] = torch.empty(shape, dtype=dtype)
        self._reader.load(targets)
        for name in names:
            yield self._cast(name, targets[self._keys[name]])

    def _cast(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        dtype = self.layout[name][0]
        cast = tensor.to(dtype)
        narrower = cast is not tensor and torch.finfo(dtype).max < torch.finfo(tensor.dtype).max
        if narrower and cast.isinf().any() and not tensor.isinf().any():
            self.infinite.append(name)
        return cast

    def _described(self, key: str) -> tuple[torch.dtype, torch.Size]:
        shape, dtype = self._reader.shape_and_dtype(key)
        return (self._dtype if self._dtype is not None and dtype.is_floating_point else dtype), shape


def _state_of(contents: Contents, model: str) -> dict[str, Any]:
    skeleton = contents.skeleton
    if model not in skeleton or not isinstance(skeleton[model], dict):
        models = sorted(name for name in skeleton if name.startswith("model"))
        raise CheckpointError(f"the checkpoint has no {model!r}; it has {', '.join(models) or 'no model'}")
    return dict(skeleton[model])


def _stripped(names: list[str], prefix: str) -> dict[str, str]:
    """New name → old name. Names without the prefix stay as they are."""
    if prefix and not any(name.startswith(prefix) for name in names):
        first = f"; the first is {names[0]!r}" if names else ""
        raise CheckpointError(f"no tensor's name begins with {prefix!r}{first}")
    stripped: dict[str, str] = {}
    for name in names:
        new = name.removeprefix(prefix)
        if not new:
            raise CheckpointError(f"without {prefix!r} nothing is left of the name {name!r}")
        if new in stripped:
            raise CheckpointError(f"without {prefix!r}, {stripped[new]!r} and {name!r} are both called {new!r}")
        stripped[new] = name
    return stripped
