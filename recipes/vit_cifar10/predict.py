"""Classifies images with a trained ViT: keepstep predict RUN --data DIR --output DIR --with predict.py."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from data import normalise
from model import ViT
from PIL import Image
from torch import nn

Array = npt.NDArray[Any]


def make_model() -> nn.Module:
    """As train.py makes it by default; give it the same sizes if you trained with others."""
    model: nn.Module = ViT()
    return model


def predict(model: nn.Module, batch: dict[str, Array]) -> dict[str, Array]:
    """`batch`: rows of CIFAR-10's Parquet files."""
    decoded = np.stack([np.asarray(Image.open(io.BytesIO(image["bytes"])).convert("RGB")) for image in batch["image"]])
    images = torch.from_numpy(decoded).permute(0, 3, 1, 2).to(next(model.parameters()).device)
    probability, predicted = model(normalise(images)).softmax(1).max(1)
    return {"predicted": predicted.cpu().numpy(), "probability": probability.cpu().numpy()}
