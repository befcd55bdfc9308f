"""What a Ray cluster has room for, and what is said of nodes that will not do; without a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from keepstep.config import LaunchConfig
from keepstep.engines import ray_cluster
from keepstep.engines.ray_cluster import Cluster, Node
from keepstep.errors import ConfigError


def node(address: str, **resources: float) -> Node:
    return Node(f"id-{address}", address, {**resources, "memory": 1e9, f"node:{address}": 1.0})


def cluster(monkeypatch: pytest.MonkeyPatch, nodes: list[Node], device: str = "auto", **settings: Any) -> Cluster:
    monkeypatch.setattr(Cluster, "nodes", property(lambda _: nodes))
    monkeypatch.setattr(ray_cluster, "_can_grow", lambda: False)
    return Cluster(LaunchConfig(engine="ray", **settings), device, None)


@pytest.mark.parametrize(
    ("need", "room"),
    [({"CPU": 1.0}, 5), ({"CPU": 2.0}, 2), ({"CPU": 0.5}, 10), ({"CPU": 1.0, "GPU": 1.0}, 0), ({"A100": 1.0}, 0)],
)
def test_room_is_counted_in_whole_workers(need: dict[str, float], room: int) -> None:
    assert node("a", CPU=5).room_for(need) == room


def test_a_worker_gets_a_gpu_where_there_are_some(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [node("a", CPU=4), node("b", CPU=4, GPU=2)]
    assert cluster(monkeypatch, nodes).need == {"CPU": 1.0, "GPU": 1.0}
    assert cluster(monkeypatch, nodes, device="cpu").need == {"CPU": 1.0}
    assert cluster(monkeypatch, nodes, gpus_per_worker=0.5).need == {"CPU": 1.0, "GPU": 0.5}
    assert cluster(monkeypatch, nodes, gpus_per_worker=0).need == {"CPU": 1.0}
    assert cluster(monkeypatch, nodes[:1]).need == {"CPU": 1.0}


def test_what_can_never_be_had_is_refused_with_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [node("10.0.0.1", CPU=3), node("10.0.0.2", CPU=3, GPU=1, A100=1)]
    cluster(monkeypatch, nodes, workers=2, cpus_per_worker=2, gpus_per_worker=0).check_room()
    with pytest.raises(ConfigError) as error:
        cluster(monkeypatch, nodes, workers=3, cpus_per_worker=2, gpus_per_worker=0).check_room()
    text = str(error.value)
    assert "3 workers of 2 CPU each were asked for; the cluster has room for 2" in text
    assert "10.0.0.1 (3 CPU); 10.0.0.2 (3 CPU, 1 GPU, A100)" in text


def test_what_this_machine_never_has_is_refused_before_a_ray_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray_cluster, "connect", lambda *_, **__: pytest.fail("a Ray was started"))
    asked = LaunchConfig(engine="ray", workers=2, gpus_per_worker=64)
    with pytest.raises(ConfigError, match=r"2 workers of 1 CPU \+ 64 GPU each .* room for 0: this machine \("):
        Cluster(asked, "auto", None).__enter__()


def test_an_elastic_run_needs_room_for_its_least(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster(monkeypatch, [node("a", CPU=2)], workers="2:8").check_room()
    with pytest.raises(ConfigError, match="3 workers of 1 CPU each"):
        cluster(monkeypatch, [node("a", CPU=2)], workers="3:8").check_room()


def test_what_an_autoscaler_may_add_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    there = cluster(monkeypatch, [node("a", CPU=2)], workers=64)
    monkeypatch.setattr(ray_cluster, "_can_grow", lambda: True)
    there.check_room()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"versions": {"torch": "2.0.0"}}, "node 10.0.0.9 has torch 2.0.0, this machine "),
        ({"versions": {"keepstep": None}}, "node 10.0.0.9 has no keepstep, this machine "),
        ({"sees_file": False}, "node 10.0.0.9 does not see /data/runs/a: the run folder must be on a disk that all"),
        ({"trouble": "access denied"}, "node 10.0.0.9 cannot use --storage s3://bucket/runs/a: access denied"),
    ],
)
def test_a_node_that_will_not_do_is_named_with_what_to_do(change: dict[str, Any], says: str) -> None:
    good = {"versions": ray_cluster._versions(), "sees_file": True, "trouble": None}
    probe = ray_cluster._Probe("s3://bucket/runs/a", "/data/runs/a/.probe")
    ray_cluster._check_node(node("10.0.0.9"), good, probe)
    versions = {**good["versions"], **change.get("versions", {})}
    with pytest.raises(ConfigError) as error:
        ray_cluster._check_node(node("10.0.0.9"), {**good, **change, "versions": versions}, probe)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("ray://head:10001", "is Ray's client"),
        ("127.0.0.1:1", "no Ray cluster can be used at 127.0.0.1:1 "),
    ],
)
def test_an_address_that_will_not_do_is_refused_at_once(address: str, says: str) -> None:
    pytest.importorskip("ray")
    with pytest.raises(ConfigError, match=says), Cluster(LaunchConfig(engine="ray", address=address), "cpu", None):
        pass


def test_the_probe_is_a_file_of_the_run_folder_and_goes_again(tmp_path: Path) -> None:
    from keepstep.folder import RunFolder

    folder = RunFolder(tmp_path, "a")
    folder.create()
    with ray_cluster._probe(folder) as probe:
        assert probe.file is not None
        assert ray_cluster._look_around(probe)["sees_file"]
    assert not ray_cluster._look_around(probe)["sees_file"]
    assert not list((tmp_path / "a").glob(".probe*"))
