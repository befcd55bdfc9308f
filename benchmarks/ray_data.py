"""A Ray data set through keepstep against `ds.iter_torch_batches`: seconds for all batches of an epoch, in pairs."""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from measure import RESULTS, Row, compare, paired, print_table, write_json

import keepstep
from keepstep.collective import Collective
from keepstep.data.loader import Loader
from keepstep.data.ray_source import Joined

CPU = torch.device("cpu")
TARGET = 1.0
MB = 1 << 20


def images(batch: dict[str, Any], side: int) -> dict[str, Any]:
    """What a transform on the cluster makes: an image and a label for each id."""
    ids = batch["id"]
    pixels = np.broadcast_to((ids % 256).astype(np.uint8)[:, None, None, None], (len(ids), side, side, 3))
    return {"id": ids, "image": np.ascontiguousarray(pixels), "label": ids % 10}


def datasets(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    import ray.data

    made = ray.data.range(arguments.rows, override_num_blocks=arguments.blocks)
    made = made.map_batches(images, fn_kwargs={"side": arguments.side}, batch_size=None)

    def files() -> Any:
        made.write_parquet(str(folder / "images"))
        return ray.data.read_parquet(str(folder / "images"))

    makers = {"blocks in memory": made.materialize, "made by map_batches": lambda: made, "Parquet files": files}
    return {name: make() for name, make in makers.items() if arguments.only in name}


def seconds_of(batches: Callable[[], Iterator[Any]], expected_rows: int, step_s: float) -> float:
    """One epoch, with a training step that takes as long as given."""
    began, rows = time.perf_counter(), 0
    for batch in batches():
        rows += len(batch["id"])
        if step_s:
            time.sleep(step_s)
    assert rows == expected_rows, f"{rows} rows, not {expected_rows}"
    return time.perf_counter() - began


class Ours:
    """A prepared loader of one worker."""

    _count = 0

    def __init__(self, dataset: Any, arguments: argparse.Namespace, shuffle: bool) -> None:
        Ours._count += 1
        loader = keepstep.RayData(dataset, arguments.batch_size, shuffle=shuffle, window_rows=arguments.window_rows)
        self.loader = Loader(Joined(loader, Collective(1, CPU), f"benchmark-{Ours._count}"), 0, 0, 1, CPU)

    def batches(self) -> Iterator[Any]:
        self.loader.begin_epoch()
        return (batch.data for batch in self.loader.training_pass())


def measured(name: str, dataset: Any, arguments: argparse.Namespace, shuffle: bool) -> Row:
    ours = Ours(dataset, arguments, shuffle)
    options: dict[str, Any] = {"batch_size": arguments.batch_size, "prefetch_batches": 4}
    if shuffle:
        options["local_shuffle_buffer_size"] = arguments.window_rows
    pairs = paired(
        lambda: seconds_of(lambda: iter(dataset.iter_torch_batches(**options)), arguments.rows, arguments.step),
        lambda: seconds_of(ours.batches, arguments.rows, arguments.step),
        arguments.pairs + 1,
    )[1:]  # in the first, processes are started
    order = "shuffled" if shuffle else "in order"
    row = compare(f"{name}, {order}", ("iter_torch_batches", "keepstep.RayData"), pairs, TARGET)
    rate = arguments.rows * (arguments.side**2 * 3 + 16) / MB / row.seconds["keepstep.RayData"].median
    row.notes["keepstep's rate"] = f"{rate:.0f} MiB/s"
    row.notes["private memory of this process"] = f"{psutil.Process().memory_full_info().uss / MB:.0f} MiB"
    print(f"{row.name}: {row.ratio.show()}", flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--side", type=int, default=64, help="of an image, in pixels")
    parser.add_argument("--blocks", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--window-rows", type=int, default=2048)
    parser.add_argument("--step", type=float, default=0.0, help="seconds that a training step takes")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--only", default="", help="data sets whose name has this in it")
    parser.add_argument("--output", help="file under benchmarks/results")
    arguments = parser.parse_args()
    import ray

    ray.init("local", include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    ray.data.DataContext.get_current().enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        rows = [
            measured(name, dataset, arguments, shuffle)
            for name, dataset in datasets(arguments, Path(folder)).items()
            for shuffle in (False, True)
        ]
    print_table(rows)
    if arguments.output:
        write_json(RESULTS / arguments.output, rows, {**vars(arguments), "output": None})
    ray.shutdown()


if __name__ == "__main__":
    main()
