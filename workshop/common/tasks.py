"""What the lessons train: ViT on CIFAR-10 and ResNet-18 on MNIST, whole on a GPU, small without one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from common import cifar10, mnist
from common.resnet import ResNet18
from common.vit import ViT


@dataclass(frozen=True)
class Task:
    """A model, its data and its optimizer."""

    title: str
    data: Any
    """The module that loads and normalises it."""
    make_model: Callable[..., nn.Module]
    small: dict[str, int]
    """What makes the model small enough to train on a laptop's CPU."""
    optimizer: Callable[..., torch.optim.Optimizer]
    optimizer_settings: dict[str, float]
    batch_size: int
    """Of all workers together."""
    classes: tuple[str, ...]

    def model(self, small: bool) -> nn.Module:
        return self.make_model(**(self.small if small else {}))

    def datasets(self, data: str | None, limit: int | None) -> tuple[TensorDataset, TensorDataset]:
        """Training and test set: (image uint8, label), or the first `limit` of each."""
        train, test = self.data.load(data, limit)
        return TensorDataset(train.images, train.labels), TensorDataset(test.images, test.labels)

    def normalise(self, images: Tensor) -> Tensor:
        """On the device: a byte a pixel travels there, not four."""
        normalised: Tensor = self.data.normalise(images)
        return normalised

    def make_optimizer(self, model: nn.Module, lr: float | None) -> torch.optim.Optimizer:
        settings = self.optimizer_settings | ({} if lr is None else {"lr": lr})
        return self.optimizer(model.parameters(), **settings)


CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

TASKS = {
    "vit": Task(
        title="ViT on CIFAR-10",
        data=cifar10,
        make_model=ViT,
        small={"num_layers": 2, "num_heads": 4, "hidden": 64, "mlp": 128},
        optimizer=torch.optim.AdamW,
        optimizer_settings={"lr": 1e-3, "weight_decay": 1e-2},
        batch_size=512,
        classes=CIFAR10_CLASSES,
    ),
    "vit-large": Task(
        title="ViT of 0.78 B parameters on MNIST",
        data=SimpleNamespace(load=mnist.load, normalise=lambda images: mnist.normalise(images).expand(-1, 3, -1, -1)),
        make_model=partial(ViT, image=28, patch=7, num_layers=12, num_heads=8, hidden=3840, mlp=768),
        small={"num_layers": 2, "num_heads": 4, "hidden": 64, "mlp": 128},
        optimizer=torch.optim.AdamW,
        optimizer_settings={"lr": 1e-4, "weight_decay": 1e-2},
        batch_size=128,
        classes=tuple("0123456789"),
    ),
    "resnet": Task(
        title="ResNet-18 on MNIST",
        data=mnist,
        make_model=ResNet18,
        small={"width_divisor": 8},
        optimizer=torch.optim.Adam,
        optimizer_settings={"lr": 1e-3},
        batch_size=256,
        classes=tuple("0123456789"),
    ),
}
