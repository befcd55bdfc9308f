"""A trained model, and what it says of PNG images: the same code in one process, in a task or in an actor."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn

from common.tasks import TASKS, Task

DESCRIPTION, WEIGHTS = "model.json", "model.safetensors"


def describe_model(folder: str | Path, task: str, small: bool) -> None:
    """Weights alone do not say what they are weights of: which model, and how its input was normalised."""
    path = Path(folder) / DESCRIPTION
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"task": task, "small": small}))


def make_model(folder: str | Path) -> tuple[Task, nn.Module]:
    """The task and its model as they were trained, without their weights."""
    path = Path(folder) / DESCRIPTION
    if not path.is_file():
        sys.exit(f"{path} is not there: train first, with python train.py")
    described = json.loads(path.read_text())
    task = TASKS[described["task"]]
    return task, task.model(described["small"])


class Classifier:
    """Loads the weights once; called with PNG images, says what they show."""

    def __init__(self, folder: str | Path, use_gpu: bool = False) -> None:
        self.task, self.model = make_model(folder)
        weights = Path(folder) / WEIGHTS
        if not weights.is_file():
            sys.exit(f"{weights} is not there: keepstep export digits --storage {folder}/runs --output {weights}")
        self.model.load_state_dict(load_file(weights))
        self.model.to("cuda" if use_gpu else "cpu").eval()

    @torch.inference_mode()
    def __call__(self, pngs: Iterable[bytes]) -> dict[str, np.ndarray[Any, Any]]:
        return classify(self.task, self.model, decode(pngs))


def classify(task: Task, model: nn.Module, images: Tensor) -> dict[str, np.ndarray[Any, Any]]:
    """`images`: uint8; they are normalised here, as they were for training."""
    images = images.to(next(model.parameters()).device)
    probability, predicted = model(task.normalise(images)).softmax(1).max(1)
    return {"predicted": predicted.cpu().numpy(), "probability": probability.cpu().numpy()}


def encode(image: Tensor) -> bytes:
    """An image, uint8 [channels, height, width], as PNG."""
    pixels = image.squeeze(0).numpy() if len(image) == 1 else image.permute(1, 2, 0).contiguous().numpy()
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def decode(pngs: Iterable[bytes]) -> Tensor:
    """uint8 [n, channels, height, width]."""
    images = torch.from_numpy(np.stack([np.asarray(Image.open(io.BytesIO(png))) for png in pngs]))
    return images[:, None] if images.dim() == 3 else images.permute(0, 3, 1, 2)
