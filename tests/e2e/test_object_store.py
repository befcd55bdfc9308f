"""Runs in an object store: moto's S3 server on this machine, behind a network that misbehaves."""

from __future__ import annotations

import datetime
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from contract.jobs import EVERY, SCRIPT, Combination, Done, assert_same, command, job
from e2e.conftest import URL
from e2e.flaky import FlakyNetwork
from keepstep.checkpoint import remote as remote_module
from keepstep.checkpoint.mirror import HOLDER
from keepstep.checkpoint.remote import MissingObject, Remote
from keepstep.cli import main
from keepstep.engines import Outcome
from keepstep.errors import StorageError
from keepstep.folder import RunFolder
from keepstep.holder import Holder

pytest.importorskip("s3fs")
pytest.importorskip("moto.server")

ONE, TWO = Combination("inprocess", "single", 1), Combination("torchrun", "ddp", 2)


def another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on nothing is in the cache."""
    monkeypatch.setenv("KEEPSTEP_CACHE", str(tmp_path / "other-cache"))


def let_time_pass(bucket: Any, name: str, seconds: float = 600) -> None:
    """The holder has not renewed for so long."""
    entry = bucket[f"runs/{name}/{HOLDER}"]
    entry.last_modified -= datetime.timedelta(seconds=seconds)


def in_store(bucket: Any, name: str) -> list[str]:
    return sorted(key.removeprefix(f"runs/{name}/") for key in bucket)


def start_two_machines(tmp_path: Path) -> list[subprocess.Popen[bytes]]:
    """A worker on each, which share nothing but the object store."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "keepstep", "run", "--name", "a", "--storage", URL, "--keep", "2", "--device", "cpu"]
    words += ["--workers", "2", "--nodes", "2", "--rendezvous", f"127.0.0.1:{port}", "--checkpoint-every", str(EVERY)]
    return [
        subprocess.Popen(
            [*words, "--node-rank", str(number), str(SCRIPT)],
            env={**os.environ, "KEEPSTEP_CACHE": str(tmp_path / f"cache-{number}")},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for number in range(2)
    ]


def test_machines_killed_in_an_upload_are_succeeded_bitwise_by_another(
    network: FlakyNetwork, bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert job(tmp_path, "calm", TWO) is Outcome.FINISHED
    network.rate = 0.1
    running = start_two_machines(tmp_path)

    def kill(method: str, path: str) -> None:
        if method == "PUT" and "step_00000020/rank_00001" in path:
            for process in running:
                process.kill()

    network.before = kill
    assert [process.wait(120) for process in running] == [-signal.SIGKILL] * 2
    network.before = lambda method, path: None
    assert "checkpoints/step_00000015/manifest.json" in in_store(bucket, "a")
    assert "checkpoints/step_00000020/manifest.json" not in in_store(bucket, "a")

    another_machine(tmp_path, monkeypatch)
    let_time_pass(bucket, "a")
    assert command(URL, "a", TWO, [], "--keep", "2") == 0
    assert sum(network.faults.values()) > 5, "the network was too good to show anything"
    calm, moved = Done(RunFolder(tmp_path, "calm")), Done(RunFolder(URL, "a"))
    assert [event["step"] for event in moved.events("resumed")] == [15]
    assert len(moved.events("started")) == 1, "what happened on the first machines is known on this one"
    assert moved.metrics == calm.metrics
    assert moved.samples == {step: seen for step, seen in calm.samples.items() if step > 15}
    assert moved.state()[0] == calm.state()[0]
    assert all(value.equal(moved.state()[1][key]) for key, value in calm.state()[1].items())
    stored = in_store(bucket, "a")
    assert {key.split("/")[1] for key in stored if key.startswith("checkpoints/step")} == {
        "step_00000020",
        "step_00000024",
    }
    assert {"config.json", "events.jsonl", "metrics.jsonl", "result.json"} < set(stored)
    assert HOLDER not in stored


def test_damaged_objects_are_passed_over_and_an_end_is_known_everywhere(
    network: FlakyNetwork,
    bucket: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert job(URL, "a", ONE) is Outcome.FINISHED
    calm = Done(RunFolder(tmp_path / "calm", "a"))
    shutil.copytree(RunFolder(URL, "a").path, calm.folder.path)

    another_machine(tmp_path, monkeypatch)
    capsys.readouterr()
    assert job(URL, "a", ONE) is Outcome.FINISHED
    assert "run 'a' finished at step 24: nothing to do" in capsys.readouterr().err
    assert main(["show", "a", "--storage", URL]) == 0
    shown = capsys.readouterr().out
    assert f"a  finished, in {URL}/a" in shown and "5, 10, 15, 20, 24" in shown
    assert main(["runs", "--storage", URL]) == 0
    assert "finished" in capsys.readouterr().out
    output = tmp_path / "weights.safetensors"
    assert main(["export", "a", "--storage", URL, "--checkpoint", "10", "--output", str(output)]) == 0
    assert output.exists()

    shutil.rmtree(RunFolder(URL, "a").path)
    del bucket["runs/a/result.json"]
    newest = "checkpoints/step_00000024/rank_00000.safetensors"
    objects = Remote.open(f"{URL}/a")
    objects.write(newest, objects.read(newest)[:-100])
    del bucket["runs/a/checkpoints/step_00000020/manifest.json"]
    assert job(URL, "a", ONE, keep=3) is Outcome.FINISHED
    done = Done(RunFolder(URL, "a"))
    (passed_over,) = done.events("checkpoint_passed_over")
    assert passed_over["problem"].startswith("step_00000024/rank_00000.safetensors has ")
    assert passed_over["problem"].endswith(f"were written, in {URL}/a")
    assert [event["step"] for event in done.events("resumed")] == [15]
    assert done.metrics == calm.metrics
    assert done.state()[0] == calm.state()[0]
    kept = [key for key in in_store(bucket, "a") if key.endswith("manifest.json")]
    assert kept == [f"checkpoints/step_000000{step}/manifest.json" for step in (15, 20, 24)]


def test_a_store_that_goes_away_ends_the_run_in_time_and_nothing_is_lost(
    network: FlakyNetwork,
    bucket: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert job(tmp_path, "calm", ONE) is Outcome.FINISHED
    monkeypatch.setattr(remote_module, "PATIENCE_S", 1.0)
    monkeypatch.setattr("keepstep.folder._HURRY_S", 0.5)
    monkeypatch.setattr("keepstep.holder._RELEASE_PATIENCE_S", 0.5)

    def break_down(method: str, path: str) -> None:
        network.is_down = network.is_down or (method == "PUT" and "step_00000010" in path)

    network.before = break_down
    assert job(URL, "a", ONE) is Outcome.FAILED
    said = capsys.readouterr().err
    assert f"the checkpoint of step 10 could not be uploaded: {URL}/a/checkpoints/step_00000010/" in said
    assert "the same command goes on from it" in said

    network.before, network.is_down = lambda method, path: None, False
    assert job(URL, "a", ONE) is Outcome.FINISHED
    done = Done(RunFolder(URL, "a"))
    assert done.events("resumed")[-1]["step"] >= 10
    assert_same(Done(RunFolder(tmp_path, "calm")), done)
    assert "checkpoints/step_00000010/manifest.json" in in_store(bucket, "a"), "what had not got there is there now"


def test_a_store_that_is_not_there_is_one_line(
    network: FlakyNetwork, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--name", "a", "--storage", "s3://no-such/runs", str(SCRIPT)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("keepstep: storage: s3://no-such/runs/a") and "The specified bucket does not exist" in line

    monkeypatch.setattr(remote_module, "FIRST_PATIENCE_S", 0.5)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(StorageError, match=rf"^{URL}/x/k could not be written, tried \d times in \d s .*127.0.0.1:9"):
        Remote.open(f"{URL}/x").write("k", b"")


def test_pyarrow_stands_in_where_fsspec_has_no_file_system(
    network: FlakyNetwork, bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)
    remote = Remote.open(f"{URL}/x")
    assert "arrow" in type(remote._files).__module__
    (tmp_path / "file").write_bytes(b"content")
    assert remote.sizes() == {} and not remote.exists("d/file")
    remote.put(tmp_path / "file", "d/file")
    remote.write("d/other", b"more")
    assert remote.sizes() == {"d/file": 7, "d/other": 4} == remote.sizes("d")
    remote.get("d/file", tmp_path / "here" / "file")
    assert (tmp_path / "here" / "file").read_bytes() == b"content" and remote.read("d/other") == b"more"
    assert abs(remote.modified("d/file") - datetime.datetime.now().timestamp()) < 60
    remote.delete("d/file", "d/gone")
    with pytest.raises(MissingObject):
        remote.read("d/file")


def test_the_stores_clock_tells_how_long_a_holder_is_silent(
    network: FlakyNetwork, bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = Remote.open(f"{URL}/a")
    dead = Holder(remote, "a", tmp_path / "dead")
    dead._renew()
    monkeypatch.setattr("keepstep.holder._LOOK_S", 0.01)
    monkeypatch.setattr("time.time", lambda: 0.0)  # this machine's clock says nothing
    let_time_pass(bucket, "a", 179.5)
    heir = Holder(remote, "a", tmp_path / "heir")
    heir.take()
    assert set(bucket) == {f"runs/a/{HOLDER}"}
    heir.release()
    assert set(bucket) == set()
