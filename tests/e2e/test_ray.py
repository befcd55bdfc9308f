"""Runs on Ray clusters of several nodes: nodes that are lost and added, drivers that are killed, requests that wait."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from contract.jobs import Combination, Done, job
from e2e.clusters import PLAIN, add_node, finish, start, wait_for_step
from keepstep.engines import Outcome
from keepstep.folder import RunFolder

pytest.importorskip("ray")
pytestmark = pytest.mark.ray

_STEPS = 160


def assert_as_in_one_process(storage: Path, done: Done) -> None:
    assert job(storage, "calm", Combination("inprocess", "single", 1), PLAIN) is Outcome.FINISHED
    calm = Done(RunFolder(storage, "calm"))
    assert done.samples == calm.samples
    torch.testing.assert_close(torch.tensor(done.losses), torch.tensor(calm.losses), rtol=1e-4, atol=1e-5)


def sizes(done: Done) -> list[int]:
    """How many workers each attempt had."""
    resumed = done.events("resumed")
    return [resumed[0]["saved_by_workers"], *(event["workers"] for event in resumed)]


@pytest.mark.slow
def test_a_lost_node_makes_the_run_smaller_and_a_new_one_larger(cluster: Any, tmp_path: Path) -> None:
    add_node(cluster, 1)
    doomed = add_node(cluster, 1)
    run = start(cluster, tmp_path, "--workers", "1:2", arguments=[*PLAIN, "--sleep", "0.4"])
    try:
        wait_for_step(tmp_path, 12, run)
        cluster.remove_node(doomed, allow_graceful=False)
        wait_for_step(tmp_path, 40, run)
        add_node(cluster, 1)
        output = finish(run)
    finally:
        run.kill()
        run.wait()
    done = Done(RunFolder(tmp_path, "a"))
    assert sizes(done) == [2, 1, 2], output
    assert "lost with its node" in output
    (failed,) = done.events("failed")
    assert failed["failures"][0]["cause"] == "lost with its node"
    saved = [event["step"] for event in done.events("stopped")]
    assert saved and saved[-1] in [event["step"] for event in done.events("resumed")], "no step is made twice to grow"
    assert done.losses and len(done.losses) == _STEPS
    assert_as_in_one_process(tmp_path, done)


def test_a_killed_driver_takes_its_workers_along_and_the_same_command_goes_on(cluster: Any, tmp_path: Path) -> None:
    add_node(cluster, 2)
    run = start(cluster, tmp_path, "--workers", "2", arguments=[*PLAIN, "--sleep", "0.1"])
    wait_for_step(tmp_path, 12, run)
    run.kill()
    run.communicate()
    again = start(cluster, tmp_path, "--workers", "2")
    try:
        finish(again)
    finally:
        again.kill()
    done = Done(RunFolder(tmp_path, "a"))
    assert sizes(done) == [2, 2]
    assert_as_in_one_process(tmp_path, done)


def test_what_can_never_be_had_is_refused_at_once_and_what_is_in_use_is_waited_for(
    cluster: Any, tmp_path: Path
) -> None:
    add_node(cluster, 2)
    began = time.monotonic()
    refused = start(cluster, tmp_path, "--workers", "3", "--gpus-per-worker", "1")
    output, _ = refused.communicate(timeout=60)
    assert refused.returncode == 2
    assert "3 workers of 1 CPU + 1 GPU each were asked for; the cluster has room for 0" in output
    assert time.monotonic() - began < 20  # 10 s of them to start Python and connect, on a busy machine
    words = [sys.executable, "-c", _OCCUPY, cluster.address]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as taken:
        assert taken.stdout is not None and taken.stdin is not None
        assert taken.stdout.readline() == "taken\n"
        run = start(cluster, tmp_path, "--workers", "2", arguments=["--epochs", "1"])
        assert run.stdout is not None
        assert run.stdout.readline() == "keepstep: waiting for 2 CPU of which 1 are free\n"
        taken.stdin.close()
    finish(run)


_OCCUPY = """
import sys, ray
ray.init(address=sys.argv[1], log_to_driver=False)
@ray.remote(num_cpus=1)
class Holder:
    def ready(self): return True
holder = Holder.remote()
ray.get(holder.ready.remote())
print("taken", flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_a_stop_saves_on_every_node(cluster: Any, tmp_path: Path) -> None:
    add_node(cluster, 1)
    add_node(cluster, 1)
    run = start(cluster, tmp_path, "--workers", "2", arguments=[*PLAIN, "--sleep", "0.1"])
    wait_for_step(tmp_path, 7, run)
    run.send_signal(signal.SIGTERM)
    output, _ = run.communicate(timeout=60)
    assert run.returncode == 75, output
    done = Done(RunFolder(tmp_path, "a"))
    (stopped,) = done.events("stopped")
    assert json.loads((tmp_path / "a" / "result.json").read_text())["step"] == stopped["step"]


@pytest.mark.slow
def test_a_node_with_notice_makes_the_workers_save_and_move(cluster: Any, tmp_path: Path) -> None:
    import ray
    from ray._private.state import available_resources_per_node

    for _ in range(3):
        add_node(cluster, 1)
    run = start(cluster, tmp_path, "--workers", "2", arguments=[*PLAIN, "--sleep", "0.1"])
    try:
        wait_for_step(tmp_path, 7, run)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        nodes = {node["NodeID"] for node in ray.nodes() if node["Resources"].get("CPU")}
        busy = next(
            node for node, free in available_resources_per_node().items() if node in nodes and not free.get("CPU")
        )
        ray.shutdown()
        words = [str(Path(sys.executable).with_name("ray")), "drain-node", "--address", cluster.address]
        words += ["--node-id", busy, "--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot"]
        subprocess.run([*words, "--deadline-remaining-seconds", "60"], check=True, capture_output=True)
        output = finish(run)
    finally:
        run.kill()
        run.wait()
    done = Done(RunFolder(tmp_path, "a"))
    assert "1 node(s) will be taken away: saving, to go on elsewhere" in output
    assert not done.events("failed")
    (stopped,), (resumed,) = done.events("stopped"), done.events("resumed")
    assert stopped["step"] == resumed["step"], "no step is made twice"
    assert_as_in_one_process(tmp_path, done)
