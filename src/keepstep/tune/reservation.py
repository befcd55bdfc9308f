"""What a trial reserves: all that its workers need, at once and on one node, so that no two trials can wait for each
other's halves (ray#54305)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from keepstep.config import LaunchConfig
from keepstep.engines.ray_cluster import Node
from keepstep.errors import ConfigError


def as_one_worker(launch: LaunchConfig, has_gpus: bool) -> LaunchConfig:
    """A trial as Ray sees it: one thing that is as large as its workers together. Who watches over them takes nothing.

    `has_gpus`: whether the cluster has any that the workers may use; then each gets one unless told otherwise.
    """
    count = launch.max_workers
    each = launch.gpus_per_worker if launch.gpus_per_worker is not None else float(has_gpus)
    others = {name: amount for name, amount in launch.resources_per_worker.items() if name not in ("CPU", "GPU")}
    return dataclasses.replace(
        launch,
        workers=1,
        cpus_per_worker=launch.cpus_per_worker * count,
        gpus_per_worker=each * count,
        resources=",".join(f"{name}={amount * count:g}" for name, amount in others.items()) or None,
    )


def num_at_once(nodes: Iterable[Node], need: dict[str, float], trials: int) -> int:
    """How many trials have room beside each other."""
    return max(1, min(trials, sum(node.room_for(need) for node in nodes)))


def check_gpus_per_worker(launch: LaunchConfig) -> None:
    """Raises if workers of one trial would share a GPU: torchrun gives each its own."""
    each = launch.gpus_per_worker
    if each is not None and launch.max_workers > 1 and each not in (0.0, 1.0):
        raise ConfigError(
            f"--gpus-per-worker {each:g} with --workers {launch.workers}: a trial of several workers needs a whole GPU "
            "for each, or none"
        )
