"""The model within its wrapper, the optimizer's moments, and the epoch after the saved one."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn


def save(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, epoch: int) -> None:
    plain = getattr(model, "module", model)
    state = {"model": plain.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
    torch.save(state, folder / "checkpoint.pt")


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    saved = torch.load(folder / "checkpoint.pt", weights_only=True)
    getattr(model, "module", model).load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return saved["epoch"] + 1
