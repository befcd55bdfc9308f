"""One worker, nothing wrapped."""

from __future__ import annotations

from torch import nn

from keepstep.strategies.base import PreparedModel, Strategy


class Single(Strategy):
    """The model as it is."""

    name = "single"

    def wrap(self, module: nn.Module) -> PreparedModel:
        return PreparedModel(module, self.setup)
