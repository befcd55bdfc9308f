"""The sinks themselves, with the real libraries, read back by their own readers."""

from __future__ import annotations

import json
import math
import os
import resource
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from keepstep.errors import ConfigError
from keepstep.observe.sinks import About, Sink, check_installed
from keepstep.observe.sinks.registry import load

FAILED = {
    "event": "failed",
    "failures": [{"rank": 1, "step": 2, "cause": "SIGKILL", "message": ""}],
    "reason": "failure 1 of 3 forgiven",
}
LINES = [{"step": 1, "epoch": 0, "loss": 0.5}, {"step": 2, "epoch": 0, "loss": "nan"}, {"step": 2, "accuracy": 0.75}]
Make = Callable[..., Sink]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """`make("mlflow")`: the sink of a run, as often as it is started."""

    def make(name: str, option: int | None = None, series: int = 1) -> Sink:
        about = About("my-run", tmp_path, f"abc{series}", {"lr": "0.1", "keepstep.workers": "2"}, option, series)
        return load(name)(about)

    return make


@pytest.mark.parametrize("name", ["tensorboard", "mlflow", "wandb", "prometheus"])
def test_a_package_that_is_missing_is_said_with_what_to_install(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000")
    check_installed([name])
    monkeypatch.setattr("importlib.util.find_spec", lambda package: None)
    with pytest.raises(ConfigError, match=rf"--sinks {name} needs .* pip install 'keepstep\[{name}\]'"):
        check_installed([name])


def test_mlflow_without_a_place_is_said_before_anything_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    found = {"mlflow": object(), "sqlalchemy": None}
    monkeypatch.setattr("importlib.util.find_spec", found.get)
    with pytest.raises(ConfigError, match=r"set MLFLOW_TRACKING_URI to a server, .* or pip install mlflow"):
        check_installed(["mlflow"])
    found["sqlalchemy"] = object()
    check_installed(["mlflow"])


# -- TensorBoard ------------------------------------------------------------------------------------------------------


def board(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0}).Reload()


def text(found: Any, tag: str) -> str:
    (event,) = found.Tensors(f"{tag}/text_summary")
    return str(event.tensor_proto.string_val[0].decode())


def test_tensorboard_reads_back_what_two_attempts_wrote(make: Make, tmp_path: Path) -> None:
    first = make("tensorboard")
    assert first.open() == f"tensorboard --logdir {tmp_path / 'tensorboard'}"
    first.metrics(LINES)
    # Killed: not closed.
    second = make("tensorboard")
    second.open()
    assert second.reached({"loss": 1}) == {"loss": 2, "accuracy": 2}
    second.metrics([{"step": 3, "loss": 0.25}])
    second.event(FAILED)
    second.close("finished")
    found = board(tmp_path / "tensorboard")
    loss = found.Scalars("loss")
    assert [event.step for event in loss] == [1, 2, 3]
    assert (loss[0].value, loss[2].value) == (0.5, 0.25) and math.isnan(loss[1].value)
    assert text(found, "keepstep/failure") == "rank 1 at step 2: SIGKILL  (failure 1 of 3 forgiven)"
    assert text(found, "keepstep/status") == "finished"
    plugin = found.SummaryMetadata("_hparams_/session_start_info").plugin_data
    assert plugin.plugin_name == "hparams" and b"keepstep.workers" in plugin.content
    first.abandon()


def test_tensorboard_stands_a_file_that_was_cut_short(make: Make, tmp_path: Path) -> None:
    first = make("tensorboard")
    first.open()
    first.metrics([{"step": step, "loss": 0.1} for step in range(1, 10)])
    first.abandon()
    (file,) = (tmp_path / "tensorboard").iterdir()
    file.write_bytes(file.read_bytes()[:-7])
    second = make("tensorboard")
    second.open()
    assert second.reached({"loss": 5})["loss"] == 8
    second.abandon()


def test_tensorboard_says_at_once_that_the_disk_is_full(make: Make, tmp_path: Path) -> None:
    first = make("tensorboard")
    first.open()
    first.metrics([{"step": 1, "loss": 0.1}])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    (file,) = (tmp_path / "tensorboard").iterdir()
    resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + 100, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            first.metrics([{"step": step, "loss": 0.1} for step in range(2, 50)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    first.abandon()
    for _ in range(2):  # tried again, twice: what the first one has still counts
        again = make("tensorboard")
        again.open()
        (reached,) = again.reached({"loss": 1}).values()
        assert 1 < reached <= 49
        again.abandon()


def test_a_second_series_has_a_folder_of_its_own(make: Make, tmp_path: Path) -> None:
    sink = make("tensorboard", series=2)
    sink.open()
    sink.metrics([{"step": 1, "loss": 0.1}])
    sink.close("finished")
    assert [event.step for event in board(tmp_path / "tensorboard" / "again_2").Scalars("loss")] == [1]


# -- MLflow -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    return os.environ["MLFLOW_TRACKING_URI"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def mlflow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real `mlflow server`. mlflow-skinny has none: MLFLOW_SERVER_PYTHON may name a Python that has all of MLflow."""
    python = os.environ.get("MLFLOW_SERVER_PYTHON", sys.executable)
    if subprocess.run([python, "-c", "import flask, sqlalchemy, mlflow.server"], capture_output=True).returncode:
        pytest.skip(
            "no `mlflow server` here: mlflow-skinny is installed, not mlflow (MLFLOW_SERVER_PYTHON may name one)"
        )
    folder, port = tmp_path_factory.mktemp("mlflow"), free_port()
    words = [python, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    words += ["--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--artifacts-destination", str(folder)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] = "false"
    server = subprocess.Popen(
        words, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_for(f"{url}/health", server)
        yield url
    finally:
        os.killpg(server.pid, 9)
        server.wait()


def _wait_for(url: str, server: subprocess.Popen[bytes]) -> None:
    for _ in range(600):
        assert server.poll() is None, "the server has ended"
        try:
            urllib.request.urlopen(url, timeout=1).close()
            return
        except OSError:
            time.sleep(0.1)
    raise AssertionError("no server within a minute")


def only_run(url: str) -> Any:
    from mlflow import MlflowClient

    client = MlflowClient(url)
    (experiment,) = client.search_experiments(filter_string="name = 'keepstep'")
    (run,) = client.search_runs([experiment.experiment_id])
    return client, run


def check_mlflow(make: Make, url: str) -> None:
    first = make("mlflow")
    where = first.open()
    first.metrics(LINES)
    # Killed: not closed. It had noted less than it sent.
    second = make("mlflow")
    assert second.open() == where
    assert second.reached({"loss": 1}) == {"loss": 2, "accuracy": 2}
    second.event(FAILED)
    second.event(FAILED)
    second.metrics([{"step": 3, "loss": 0.25, "top/5": 0.5, "odd#name": 1.0}])
    assert only_run(url)[1].info.status == "RUNNING"
    assert second.reached({"odd#name": 3, "loss": 3})["odd#name"] == 3
    second.close("stopped")
    client, run = only_run(url)
    assert where == f"run {run.info.run_id} at {url}"
    assert [metric.step for metric in client.get_metric_history(run.info.run_id, "loss")] == [1, 2, 3]
    assert run.info.status == "KILLED" and run.info.run_name == "my-run"
    assert run.data.params == {"lr": "0.1", "keepstep.workers": "2"}
    assert run.data.metrics["top/5"] == 0.5 and run.data.metrics["odd_name"] == 1.0
    assert run.data.tags["keepstep.failures"] == "2"
    assert run.data.tags["keepstep.failure"] == "rank 1 at step 2: SIGKILL  (failure 1 of 3 forgiven)"
    for status, word in (("failed", "FAILED"), ("finished", "FINISHED")):
        again = make("mlflow")
        again.open()
        again.close(status)
        assert only_run(url)[1].info.status == word


def test_mlflow_has_one_run_of_two_attempts_in_files(make: Make, files: str) -> None:
    check_mlflow(make, files)


@pytest.mark.slow
def test_mlflow_has_one_run_of_two_attempts_on_a_server(
    make: Make, mlflow_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_server)
    check_mlflow(make, mlflow_server)


# -- W&B --------------------------------------------------------------------------------------------------------------

_TWO_ATTEMPTS = """
import json, sys
from pathlib import Path
from keepstep.observe.sinks import About
from keepstep.observe.sinks.to_wandb import WeightsAndBiases
def make():
    return WeightsAndBiases(About("my-run", Path("."), "abc1", {"lr": "0.1"}, None))
first = make()
print(first.open())
first.metrics([{"step": 1, "loss": 0.5}, {"step": 2, "loss": float("nan")}, {"step": 2, "accuracy": 0.75}])
first.close("stopped")
second = make()
second.open()
print(json.dumps(second.reached({"loss": 7})))
second.metrics([{"step": step, "loss": 0.1} for step in range(3, 2003)])
second.event(json.loads(sys.argv[1]))
second.close("failed")
third = make()
third.open()
print(json.dumps(third.reached({})))
third.close("finished")
"""


def test_wandb_offline_has_one_id_and_knows_how_far_it_got(tmp_path: Path) -> None:
    """In a process of its own: its service stays until the process ends."""
    done = subprocess.run(
        [sys.executable, "-c", _TWO_ATTEMPTS, json.dumps(FAILED)],
        cwd=tmp_path,
        env={**os.environ, "WANDB_MODE": "offline"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    where, once, twice = done.stdout.splitlines()
    assert where == "offline, id abc1, in wandb"
    assert json.loads(once) == {"loss": 2, "accuracy": 2}
    assert json.loads(twice) == {"loss": 2002, "accuracy": 2}
    attempts = sorted((tmp_path / "wandb").glob("offline-run-*"))
    assert [sorted(file.name for file in attempt.glob("*.wandb")) for attempt in attempts] == 3 * [["run-abc1.wandb"]]
    first, second = (wandb_records(attempt / "run-abc1.wandb") for attempt in attempts[:2])
    (run,) = [record.run for record in first if record.HasField("run")]
    assert (run.run_id, run.display_name, run.project) == ("abc1", "my-run", "keepstep")
    assert [record.exit.exit_code for record in (*first, *second) if record.HasField("exit")] == [0, 1]
    summary = {item.key or item.nested_key[0]: item.value_json for r in second for item in r.summary.update}
    assert "rank 1 at step 2: SIGKILL" in summary["keepstep/failure"] and summary["keepstep/failures"] == "1"


def wandb_records(path: Path) -> list[Any]:
    from wandb.proto.wandb_internal_pb2 import Record

    from keepstep.observe.sinks.to_wandb import _records

    return [Record.FromString(data) for data in _records(path.read_bytes())]


# -- Prometheus -------------------------------------------------------------------------------------------------------


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        return str(answer.read().decode())


def test_prometheus_is_scraped_on_loopback_only(make: Make) -> None:
    port = free_port()
    sink = make("prometheus", option=port)
    assert sink.open() == f"http://127.0.0.1:{port}/metrics"
    assert 'keepstep_failures_total{run="my-run"} 0.0' in scrape(port)
    sink.metrics(LINES)
    sink.event(FAILED)
    found = scrape(port)
    assert 'keepstep_metric{name="accuracy",run="my-run"} 0.75' in found
    assert 'keepstep_metric{name="loss",run="my-run"} NaN' in found
    assert 'keepstep_step{run="my-run"} 2.0' in found
    assert 'keepstep_failures_total{run="my-run"} 1.0' in found
    assert _listens(port) == {"0100007F"}
    other = make("prometheus", option=port)
    with pytest.raises(OSError, match=rf"port {port} of 127.0.0.1: Address already in use; --sinks prometheus:PORT"):
        other.open()
    sink.close("finished")
    with pytest.raises(OSError, match="refused"):
        scrape(port)
    other.open()  # the port is free at once
    other.abandon()


def _listens(port: int) -> set[str]:
    """The addresses, as the kernel writes them, on which the port is listened to."""
    rows = [
        line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    places = [row[1].split(":") for row in rows if row[3] == "0A"]
    return {address for address, number in places if int(number, 16) == port}
