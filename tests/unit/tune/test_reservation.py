"""What a trial reserves."""

from __future__ import annotations

import pytest

from keepstep.config import LaunchConfig
from keepstep.engines.ray_cluster import Node
from keepstep.errors import ConfigError
from keepstep.tune.reservation import as_one_worker, check_gpus_per_worker, num_at_once


def need(has_gpus: bool = False, **settings: object) -> dict[str, float]:
    launch = LaunchConfig(engine="ray", **settings)  # type: ignore[arg-type]
    return as_one_worker(launch, has_gpus).resources_per_worker


def test_a_trial_reserves_what_all_its_workers_need() -> None:
    assert need() == {"CPU": 1.0}
    assert need(workers=4, cpus_per_worker=2.0) == {"CPU": 8.0}
    assert need(True, workers=4) == {"CPU": 4.0, "GPU": 4.0}
    assert need(True, workers=4, gpus_per_worker=0.0) == {"CPU": 4.0}
    assert need(True, gpus_per_worker=0.5) == {"CPU": 1.0, "GPU": 0.5}
    assert need(workers=2, resources="fast=0.5") == {"CPU": 2.0, "fast": 1.0}


def test_as_many_trials_at_once_as_nodes_hold_whole() -> None:
    nodes = [Node("a", "a", {"CPU": 8.0, "GPU": 1.0}), Node("b", "b", {"CPU": 6.0})]
    assert num_at_once(nodes, {"CPU": 4.0}, 20) == 3, "half a trial on each of two nodes is none"
    assert num_at_once(nodes, {"CPU": 4.0}, 2) == 2
    assert num_at_once(nodes, {"CPU": 1.0, "GPU": 1.0}, 20) == 1
    assert num_at_once([], {"CPU": 1.0}, 20) == 1, "nodes may be added later"


def test_workers_of_a_trial_do_not_share_a_gpu() -> None:
    check_gpus_per_worker(LaunchConfig(engine="ray", gpus_per_worker=0.5))
    with pytest.raises(ConfigError, match="a whole GPU"):
        check_gpus_per_worker(LaunchConfig(engine="ray", workers=2, gpus_per_worker=0.5))
