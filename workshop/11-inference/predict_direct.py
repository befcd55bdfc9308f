"""Predicts in one process, file by file: what all other ways are compared with. python predict_direct.py."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the lessons share models and data

import pyarrow as pa
import pyarrow.parquet as pq

from common import arguments
from common.classifier import Classifier


def predict(args: argparse.Namespace) -> pa.Table:
    classifier = Classifier(args.output, args.use_gpu)
    tables = []
    for path in sorted(Path(args.output, "images").glob("*.parquet")):
        for batch in pq.ParquetFile(path).iter_batches(args.batch_size):
            found = classifier(batch["image"].to_pylist())
            tables.append(pa.table({"id": batch["id"], "label": batch["label"], **found}))
    if not tables:
        sys.exit(f"{args.output}/images holds no Parquet files: python make_images.py")
    return pa.concat_tables(tables)


def main() -> None:
    args = arguments.parse(arguments.parser(__doc__, task="resnet"))
    began = time.perf_counter()
    table = predict(args)
    seconds = time.perf_counter() - began
    folder = Path(args.output) / "predictions" / "direct"
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, folder / "part.parquet")
    accuracy = sum(a == b for a, b in zip(table["predicted"], table["label"], strict=True)) / len(table)
    print(f"{len(table):,} images in {seconds:.1f} s, accuracy {accuracy:.2%}")


if __name__ == "__main__":
    main()
