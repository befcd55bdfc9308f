"""Writes the test images as PNGs into Parquet files, as data to predict often comes: python make_images.py."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the lessons share models and data

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from common.classifier import encode
from common.tasks import TASKS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", choices=TASKS, default="resnet", help="whose images (default: %(default)s)")
    parser.add_argument("--limit", type=int, help="the first LIMIT only; otherwise all")
    parser.add_argument("--files", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--data", help="folder of the data; otherwise $KEEPSTEP_DATA, the cache or a download")
    parser.add_argument("--output", type=Path, default=Path("output"))
    args = parser.parse_args()
    images, labels = TASKS[args.task].datasets(args.data, args.limit)[1].tensors
    if not 1 <= args.files <= len(labels):
        parser.error(f"--files is {args.files}; 1 to {len(labels)}, one for each image, can be written")

    folder = args.output / "images"
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.parquet"):
        old.unlink()
    for number, ids in enumerate(np.array_split(np.arange(len(labels)), args.files)):
        table = pa.table({"id": ids, "image": [encode(images[k]) for k in ids], "label": labels[ids].numpy()})
        pq.write_table(table, folder / f"test-{number:05}.parquet")
    print(f"{len(labels):,} images in {args.files} files of {folder}")


if __name__ == "__main__":
    main()
