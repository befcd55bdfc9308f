"""Connects a lesson to Ray, and says at once what it cannot have instead of waiting for it."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

WORKSHOP = Path(__file__).parents[1]


def add_arguments(made: argparse.ArgumentParser) -> None:
    made.add_argument("--num-workers", type=int, default=2)
    made.add_argument("--cpus-per-worker", type=float, default=1.0, help="less than 1: more workers than cores")
    made.add_argument(
        "--address", help="a Ray cluster, as HOST:6379 or auto (default: $RAY_ADDRESS, or one is started)"
    )


def connect(
    num_workers: int,
    use_gpu: bool,
    cpus_per_worker: float = 1.0,
    address: str | None = None,
    data_cpus: float = 0.0,
    quiet: bool = False,
) -> Any:
    """Connects, ships the workshop's code to the workers, and returns the `ScalingConfig`.

    `data_cpus`: what Ray Data needs beside the workers; without a CPU left for it, they would wait for ever.
    `quiet`: shows nothing of what Ray and the workers print; for notebooks.
    """
    try:
        import ray
        from ray.train import ScalingConfig
    except ImportError:
        sys.exit("this lesson runs on Ray, which is not installed: pip install 'keepstep[ray]'")
    if num_workers < 1:
        sys.exit(f"--num-workers is {num_workers}; at least 1 is needed")
    if not ray.is_initialized():
        # Ray sends the lessons' shared code to every node; each worker finds the data as this process does.
        carried = {name: os.environ[name] for name in ("KEEPSTEP_DATA", "XDG_CACHE_HOME") if name in os.environ}
        variables = {"OMP_NUM_THREADS": "1", "RAY_TRAIN_ENABLE_PRINT_PATCH": "0"} | carried  # or each line comes twice
        runtime_env = {"working_dir": str(WORKSHOP), "env_vars": variables,
                       "excludes": ["**/output/**", "**/runs/**", "*.ipynb"]}  # fmt: skip
        level = "error" if quiet else "warning"
        try:
            ray.init(address=address, runtime_env=runtime_env, log_to_driver=not quiet, logging_level=level)
        except ConnectionError as error:
            sys.exit(f"no Ray answers at {address or os.environ.get('RAY_ADDRESS')}: {error}")
    there = ray.cluster_resources()
    wanted = {"CPU": num_workers * cpus_per_worker + data_cpus, "GPU": float(num_workers * use_gpu)}
    for kind, amount in wanted.items():
        if amount > there.get(kind, 0.0):
            sys.exit(_refusal(kind, num_workers, amount, there.get(kind, 0.0), data_cpus))
    resources = {"CPU": cpus_per_worker} | ({"GPU": 1.0} if use_gpu else {})
    return ScalingConfig(num_workers=num_workers, use_gpu=use_gpu, resources_per_worker=resources)


def _refusal(kind: str, num_workers: int, wanted: float, there: float, data_cpus: float) -> str:
    said = f"{num_workers} workers ask for {wanted:g} {kind}s, this Ray has {there:g}"
    if kind == "GPU":
        return f"{said}: give --num-workers {there:g}" if there else f"{said}: give --use-gpu False to train on the CPU"
    if data_cpus:
        said = f"{num_workers} workers, and {data_cpus:g} CPU to read data, ask for {wanted:g}, this Ray has {there:g}"
    left = there - data_cpus
    share = int(100 * left / num_workers) / 100
    fewer = f"--num-workers {left:g}, or " if left >= 1 else ""
    return f"{said}: give {fewer}--cpus-per-worker {share:g} to let them share cores"
