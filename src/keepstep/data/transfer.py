"""Copies batches to the device, and books the time that it takes."""

from __future__ import annotations

from typing import Any

import torch

from keepstep.data.nested import move
from keepstep.observe.heart import TRANSFER, Heart


class Transfer:
    """To one device."""

    def __init__(self, device: torch.device, heart: Heart) -> None:
        self._device, self._heart = device, heart

    def __call__(self, data: Any) -> Any:
        if self._device.type == "cpu":
            return data
        before = self._heart.phase
        self._heart.enter(TRANSFER)
        moved = move(data, self._device)
        self._heart.enter(before)
        return moved
