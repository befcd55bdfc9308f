"""Clusters of several nodes that share little and lose some: object stores, full memory, predictions and searches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from contract.jobs import Combination, Done, job
from e2e.clusters import OBJECT_STORE, add_node, finish, start
from e2e.conftest import URL
from e2e.flaky import FlakyNetwork
from e2e.test_ray_data import SCRIPT as RAY_DATA_SCRIPT
from e2e.test_ray_data import rows_of_epochs, rows_seen
from keepstep.engines import Outcome
from keepstep.folder import RunFolder

pytest.importorskip("ray")
pytestmark = [pytest.mark.ray, pytest.mark.slow]


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str], timeout_s: float = 120) -> None:
    until = time.monotonic() + timeout_s
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < until, "it did not come to that"
        time.sleep(0.1)


def command(cluster: Any, folder: Path, *words: str) -> subprocess.Popen[str]:
    """`keepstep WORDS` on the cluster."""
    return subprocess.Popen(
        [sys.executable, "-m", "keepstep", words[0], "--address", cluster.address, *words[1:]],
        cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=dict(os.environ),
    )  # fmt: skip


def test_nodes_that_share_an_object_store_and_nothing_else(
    network: FlakyNetwork, cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The workers' folders are on their nodes; the metrics and events are found here as well."""
    calm = Combination("torchrun", "ddp", 2)
    assert job(tmp_path, "calm", calm) is Outcome.FINISHED
    store = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    for number in range(2):
        add_node(cluster, 1, env_vars={**store, "KEEPSTEP_CACHE": str(tmp_path / f"node-{number}")})
    network.rate = 0.05
    script = ["--kill", "body:8:1", "body:13:0", "--sleep", "0.5"]  # what is saved is uploaded before the next kill
    finish(start(cluster, URL, "--workers", "2", "--strategy", "ddp", "--max-failures", "5", arguments=script))
    here = Done(RunFolder(URL, "a"))
    assert here.folder.path.is_relative_to(tmp_path / "cache")
    assert here.metrics == Done(RunFolder(tmp_path, "calm")).metrics
    assert len(here.events("failed")) == 2
    assert [event["step"] for event in here.events("resumed")] == [5, 10]
    monkeypatch.setenv("KEEPSTEP_CACHE", str(tmp_path / "elsewhere"))
    elsewhere = RunFolder(URL, "a")
    elsewhere.fetch()
    assert elsewhere.finished and elsewhere.read_metrics() == here.metrics


_HOG = """
import sys, time, numpy, ray
ray.init(address=sys.argv[1], log_to_driver=False)
@ray.remote(num_cpus=0, scheduling_strategy="SPREAD")
class Hog:
    def take(self, size):
        self.kept = ray.put(numpy.zeros(size, numpy.uint8))
hogs = [Hog.remote() for _ in range(6)]
ray.get([hog.take.remote(int(sys.argv[2])) for hog in hogs])
print("taken", flush=True)
sys.stdin.read()
"""


def test_rows_come_once_and_in_order_where_others_fill_the_object_store(cluster: Any, tmp_path: Path) -> None:
    """Some 300 MB through stores of 80 MB, of which somebody holds two thirds."""
    for _ in range(2):
        add_node(cluster, 2)
    words = [sys.executable, "-c", _HOG, cluster.address, str(OBJECT_STORE // 3)]
    folder, rows = RAY_DATA_SCRIPT.parent, ["--kind", "uneven", "--rows", "500"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as hog:
        assert hog.stdout is not None and hog.stdin is not None
        assert hog.stdout.readline() == "taken\n"
        flags = ["--engine", "ray", "--workers", "2", "--storage", str(tmp_path), "--device", "cpu"]
        flags += ["--checkpoint-every", "10", RAY_DATA_SCRIPT.name]
        kill = ["--kill", "9:1"]
        finish(command(cluster, folder, "run", "--name", "full", *flags, *rows, "--ballast", "400000", *kill))
        hog.stdin.close()
    finish(command(cluster, folder, "run", "--name", "free", *flags, *rows))
    full = rows_seen(tmp_path, "full")
    assert full == rows_seen(tmp_path, "free")
    assert all(max(counts.values()) == 1 for counts in rows_of_epochs(full).values())


_PREDICT = """
import time, torch, keepstep

def make_model():
    torch.manual_seed(0)
    return torch.nn.Linear(2, 1)

def predict(model, batch):
    time.sleep(0.3)
    return {"y": model(torch.from_numpy(batch["x"])).numpy()}

if __name__ == "__main__":
    run = keepstep.start()
    model = make_model()
    model, optimizer, data = run.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), torch.utils.data.DataLoader(torch.ones(4, 2), batch_size=4)
    )
    for x in run.steps(data):
        model(x).mean().backward()
        optimizer.step()
"""


def test_a_prediction_goes_on_where_a_node_is_lost(cluster: Any, tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    (tmp_path / "model.py").write_text(_PREDICT)
    (tmp_path / "data").mkdir()
    x = np.random.default_rng(0).normal(size=(12, 2048, 2)).astype(np.float32)
    for number, values in enumerate(x):
        ids = np.arange(2048) + 2048 * number
        table = pa.table({"id": ids, "x": pa.FixedSizeListArray.from_arrays(values.ravel(), 2)})
        pq.write_table(table, tmp_path / "data" / f"{number:02d}.parquet")
    keepstep = [sys.executable, "-m", "keepstep"]
    subprocess.run([*keepstep, "run", "--name", "a", "--device", "cpu", "model.py"], cwd=tmp_path, check=True)
    add_node(cluster, 1)
    doomed = add_node(cluster, 1)
    flags = ["--data", "data", "--output", "out", "--with", "model.py", "--workers", "2", "--device", "cpu"]
    process = command(cluster, tmp_path, "predict", "a", *flags)
    wait_until(lambda: len(list((tmp_path / "out").glob("part-*"))) >= 3, process)
    cluster.remove_node(doomed, allow_graceful=False)
    assert "24,576 rows predicted" in finish(process)
    assert pq.read_table(tmp_path / "out")["id"].to_pylist() == list(range(12 * 2048))


def test_a_search_goes_on_where_a_node_is_lost(cluster: Any, tmp_path: Path) -> None:
    add_node(cluster, 1)
    doomed = add_node(cluster, 1)
    script = Path(__file__).with_name("tune_train.py")
    flags = [
        "--name",
        "find",
        "--storage",
        str(tmp_path),
        "--device",
        "cpu",
        "--metric",
        "error:min",
        "--method",
        "random",
    ]
    flags += ["--space", "lr=grid(0.1,0.05,0.01)", "--checkpoint-every", "4", str(script), "--pause", "0.3"]
    process = command(cluster, script.parent, "tune", *flags)
    runs = [RunFolder(tmp_path, f"find-{number:04d}") for number in range(3)]
    wait_until(lambda: all(run.metrics.exists() and len(run.read_metrics()) > 5 for run in runs[:2]), process)
    cluster.remove_node(doomed, allow_graceful=False)
    output = finish(process)
    trials = json.loads((tmp_path / "find" / "tune.json").read_text())["trials"]
    assert Counter(trial["status"] for trial in trials) == {"finished": 3}, output
    moved = [run for run in runs if any(event["event"] == "resumed" for event in run.read_events())]
    assert len(moved) == 1, "the trial of the lost node went on where it was"
    steps = [line["step"] for line in moved[0].read_metrics() if "loss" in line]
    assert steps == list(range(1, 25))
