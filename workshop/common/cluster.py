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
    num_workers: int, use_gpu: bool, cpus_per_worker: float = 1.0, address: str | None = None, logs: bool = True
) -> Any:
    """Connects, ships the workshop's code to the workers, and returns the `ScalingConfig`.

    `logs`: whether what workers print is shown here.
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
        runtime_env = {"working_dir": str(WORKSHOP), "env_vars": {"OMP_NUM_THREADS": "1"} | carried,
                       "excludes": ["**/output/**", "**/runs/**", "*.ipynb"]}  # fmt: skip
        try:
            ray.init(address=address, runtime_env=runtime_env, log_to_driver=logs, logging_level="warning")
        except ConnectionError as error:
            sys.exit(f"no Ray answers at {address or os.environ.get('RAY_ADDRESS')}: {error}")
    there = ray.cluster_resources()
    wanted = {"CPU": num_workers * cpus_per_worker, "GPU": float(num_workers * use_gpu)}
    for kind, amount in wanted.items():
        if amount > there.get(kind, 0.0):
            sys.exit(_refusal(kind, num_workers, amount, there.get(kind, 0.0)))
    resources = {"CPU": cpus_per_worker} | ({"GPU": 1.0} if use_gpu else {})
    return ScalingConfig(num_workers=num_workers, use_gpu=use_gpu, resources_per_worker=resources)


def _refusal(kind: str, num_workers: int, wanted: float, there: float) -> str:
    said = f"{num_workers} workers ask for {wanted:g} {kind}s, this Ray has {there:g}"
    if kind == "GPU":
        return f"{said}: give --num-workers {there:g}" if there else f"{said}: give --use-gpu False to train on the CPU"
    share = int(100 * there / num_workers) / 100
    return f"{said}: give --num-workers {there:g}, or --cpus-per-worker {share:g} to let them share cores"
