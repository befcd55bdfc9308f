"""Images in Parquet files: written once, read and decoded by Ray Data."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import TensorDataset


def write(images: TensorDataset, folder: Path, rows_per_file: int) -> list[Path]:
    """Columns: `id`, the row's number; `image`, a PNG; `label`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("part-*.parquet"):
        old.unlink()
    pixels, labels = (tensor.numpy() for tensor in images.tensors)
    written = []
    for number, first in enumerate(range(0, len(labels), rows_per_file)):
        ids = np.arange(first, min(first + rows_per_file, len(labels)))
        pngs = [_encode(pixels[row]) for row in ids]
        path = folder / f"part-{number:05}.parquet"
        pq.write_table(pa.table({"id": ids, "image": pngs, "label": labels[ids]}), path)
        written.append(path)
    return written


def read(folder: str | Path) -> Any:
    """A lazy `ray.data.Dataset` of {"id", "image": uint8 [channels, height, width], "label"}: nothing is read yet."""
    import ray.data

    if not any(Path(folder).glob("*.parquet")):
        sys.exit(f"{folder} has no Parquet files: python images_to_parquet.py writes them")
    return ray.data.read_parquet(str(folder)).map_batches(decode)


def decode(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """PNGs to pixels, on any CPU of the cluster."""
    return {**batch, "image": np.stack([_decode(png) for png in batch["image"]])}


def _encode(planes: np.ndarray) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(planes.transpose(1, 2, 0).squeeze()).save(file, "PNG")
    return file.getvalue()


def _decode(png: bytes) -> np.ndarray:
    from PIL import Image

    pixels = np.asarray(Image.open(io.BytesIO(png)))
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
