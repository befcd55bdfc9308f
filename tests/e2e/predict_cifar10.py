"""A small ViT on CIFAR-10's own Parquet files: `keepstep run` trains it a little, `keepstep predict` uses it.

Where $KILL_AT names a batch, predict kills its process there, once: the file $KILLED notes it.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes" / "vit_cifar10"))
from model import ViT  # type: ignore[import-not-found]

calls = 0


def make_model() -> nn.Module:
    model: nn.Module = ViT(patch=8, num_layers=2, num_heads=4, hidden=32, mlp=64)
    return model


def pixels(images: Any) -> torch.Tensor:
    decoded = [np.asarray(Image.open(io.BytesIO(image["bytes"]))) for image in images]
    return torch.from_numpy(np.stack(decoded)).permute(0, 3, 1, 2).float() / 127.5 - 1


def predict(model: nn.Module, batch: dict[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
    global calls
    calls += 1
    if str(calls) == os.environ.get("KILL_AT") and not os.path.exists(os.environ["KILLED"]):
        Path(os.environ["KILLED"]).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    logits = model(pixels(batch["image"]))
    names = np.array([image["path"] for image in batch["image"]])
    return {"file": names, "logits": logits.numpy(), "predicted": logits.argmax(1).numpy()}


def train(file: str) -> None:
    import pyarrow.parquet as pq

    import keepstep

    run = keepstep.start()
    table = pq.ParquetFile(file).read_row_group(0).slice(0, 640)
    torch.manual_seed(0)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    dataset = TensorDataset(pixels(table["image"].to_pylist()), torch.tensor(table["label"].to_pylist()))
    model, optimizer, batches = run.prepare(model, optimizer, DataLoader(dataset, batch_size=64, shuffle=True))
    for _ in run.epochs(3):
        for images, labels in run.steps(batches):
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss=loss)


if __name__ == "__main__":
    train(sys.argv[1])
