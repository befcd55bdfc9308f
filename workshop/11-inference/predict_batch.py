"""Predicts a folder of Parquet files with raw Ray Data: map_batches over actors that each hold the model.

    python predict_batch.py --num-workers 2

Lines that are there because it is distributed end with the number of their step:
[1] connect  [2] a class that loads the model once an actor  [3] read  [4] a pool of actors  [5] write
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the lessons share models and data

import numpy as np

from common import arguments, cluster
from common.classifier import Classifier, make_model

Batch = dict[str, Any]


class Predictor:  # [2]
    def __init__(self, folder: str, use_gpu: bool) -> None:  # [2]
        self._classifier = Classifier(folder, use_gpu)  # [2]

    def __call__(self, batch: Batch) -> Batch:  # [2]
        actor = np.full(len(batch["id"]), os.getpid())  # who did it
        return {"id": batch["id"], "label": batch["label"], "actor": actor, **self._classifier(batch["image"])}


def predict(args: argparse.Namespace) -> Path:
    """Returns the folder of the predictions."""
    images, folder = Path(args.output) / "images", Path(args.output) / "predictions" / "ray_data"
    make_model(args.output)  # says here, and not in an actor, that nothing is trained yet
    if not any(images.glob("*.parquet")):
        sys.exit(f"{images} holds no Parquet files: python make_images.py")
    cluster.connect(args.num_workers, args.use_gpu, args.cpus_per_worker, args.address, quiet=True)  # [1]
    import ray.data  # [1]

    shutil.rmtree(folder, ignore_errors=True)  # what an earlier prediction left would be counted twice
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    ray.data.DataContext.get_current().enable_progress_bars = False
    dataset = ray.data.read_parquet(str(images))  # [3]
    # Small files are read as one block, and a block goes to one actor: without this, one would do all the work.
    dataset = dataset.repartition(target_num_rows_per_block=args.batch_size)  # [3]
    predicted = dataset.map_batches(  # [4]
        Predictor,  # [4]
        fn_constructor_args=(args.output, args.use_gpu),  # [4]
        batch_size=args.batch_size,  # [4]
        compute=ray.data.ActorPoolStrategy(size=args.num_workers),  # [4]
        num_cpus=args.cpus_per_worker,  # [4]
        num_gpus=int(args.use_gpu),  # [4]
    )  # [4]
    predicted.write_parquet(str(folder))  # [5]
    return folder


def main() -> None:
    made = arguments.parser(__doc__, task="resnet")
    cluster.add_arguments(made)
    # Writing takes a core too: actors that reserve all of them would wait for it, and it for them.
    made.set_defaults(cpus_per_worker=0.5)
    args = arguments.parse(made)
    began = time.perf_counter()
    folder = predict(args)
    seconds = time.perf_counter() - began
    import pandas as pd

    table = pd.read_parquet(folder)
    accuracy = (table["predicted"] == table["label"]).mean()
    shares = " + ".join(f"{share:,}" for share in table["actor"].value_counts())
    print(f"{len(table):,} images in {seconds:.1f} s, by {args.num_workers} actors {shares}, accuracy {accuracy:.2%}")


if __name__ == "__main__":
    main()
