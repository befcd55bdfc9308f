"""`keepstep predict` on CIFAR-10, killed in the middle, against predictions made by hand in PyTorch."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from e2e.conftest import BUCKET, URL
from e2e.flaky import FlakyNetwork

pq = pytest.importorskip("pyarrow.parquet")

SCRIPT = Path(__file__).with_name("predict_cifar10.py")
DATA = Path(os.environ.get("KEEPSTEP_DATA", Path(__file__).parents[3] / "shared" / "data")) / "cifar10"
TEST_SET = DATA / "test-00000-of-00001.parquet"
KEEPSTEP = str(Path(sys.executable).with_name("keepstep"))
NUM_PARTS = 4

pytestmark = pytest.mark.skipif(
    not TEST_SET.exists(), reason="needs CIFAR-10 as Parquet: set KEEPSTEP_DATA to a folder with cifar10/"
)


class Trained(NamedTuple):
    storage: Path
    files: list[str]
    labels: list[int]
    logits: np.ndarray[Any, Any]
    """Of the whole test set, made by PyTorch alone."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train(tmp_path_factory.mktemp("trained"))


def train(folder: Path, *flags: str) -> Trained:
    words = ["run", "--device", "cpu", "--name", "vit", *flags]
    _check(subprocess.run([KEEPSTEP, *words, str(SCRIPT), str(TEST_SET)], cwd=folder, capture_output=True, text=True))
    export = [KEEPSTEP, "export", "vit", "--output", "vit.safetensors"]
    _check(subprocess.run(export, cwd=folder, capture_output=True, text=True))
    spec = importlib.util.spec_from_file_location("predict_cifar10", SCRIPT)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    model = script.make_model()
    model.load_state_dict(load_file(folder / "vit.safetensors"))
    model.eval()
    rows = pq.read_table(TEST_SET).to_pylist()
    with torch.no_grad():
        chunks = [rows[start : start + 1000] for start in range(0, len(rows), 1000)]
        logits = torch.cat([model(script.pixels([row["image"] for row in chunk])) for chunk in chunks])
    files, labels = [row["image"]["path"] for row in rows], [row["label"] for row in rows]
    return Trained(folder / "runs", files, labels, logits.numpy())


def _check(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def command(trained: Trained, *words: str) -> list[str]:
    chosen = ["--storage", str(trained.storage), "--data", str(TEST_SET), "--output", "out", "--with", str(SCRIPT)]
    return [KEEPSTEP, "predict", "vit", *chosen, "--device", "cpu", *words]


def predict(trained: Trained, folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, **environment}
    return subprocess.run(
        command(trained, *words), cwd=folder, capture_output=True, text=True, timeout=200, env=variables
    )


def parts(folder: Path) -> int:
    return len(list((folder / "out").glob("part-*.parquet")))


def check_output(trained: Trained, folder: Path) -> None:
    """Every row once, in order, with PyTorch's own logits."""
    table = pq.read_table(folder / "out")
    assert table.schema.names == ["label", "file", "logits", "predicted"]
    assert table["file"].to_pylist() == trained.files
    assert table["label"].to_pylist() == trained.labels
    logits = np.stack(table["logits"].to_numpy())
    np.testing.assert_allclose(logits, trained.logits, rtol=1e-4, atol=1e-5)
    assert (table["predicted"].to_numpy() == trained.logits.argmax(1)).mean() > 0.9999
    assert json.loads((folder / "out" / "_prediction.json").read_text())["finished"]
    assert not list((folder / "out").glob(".writing-*"))


def test_killed_in_the_middle_it_goes_on(trained: Trained, tmp_path: Path) -> None:
    batches = {"KILL_AT": "14", "KILLED": str(tmp_path / "killed")}  # the second piece: 10 batches of 256 make one
    assert predict(trained, tmp_path, **batches).returncode == -signal.SIGKILL
    assert parts(tmp_path) == 1
    said = _check(predict(trained, tmp_path, "--batch-size", "500"))
    assert "2,500 of 10,000 rows are there" in said and "(7,500 rows in" in said
    check_output(trained, tmp_path)


def variant(folder: Path, old: str, new: str) -> str:
    """The script with something else in it: Ray's workers have the environment of their Ray, not the command's."""
    text = SCRIPT.read_text()
    assert old in text
    changed = folder / "predict.py"
    changed.write_text(text.replace(old, new).replace("Path(__file__).parents[2]", f"Path({str(SCRIPT.parents[2])!r})"))
    return str(changed)


@pytest.mark.ray
def test_on_ray_a_worker_that_dies_is_replaced(trained: Trained, tmp_path: Path, ray_address: str) -> None:
    variables = {"KILL_AT": "4", "KILLED": str(tmp_path / "killed")}
    script = variant(tmp_path, "calls = 0", f"calls = 0\nos.environ.update({variables!r})")
    ray = ["--workers", "2", "--address", ray_address, "--with", script]
    said = _check(predict(trained, tmp_path, *ray))
    assert (tmp_path / "killed").exists()
    assert said.startswith(f"{tmp_path}/out: 10,000 rows predicted with step 30 of vit, in 4 parts")
    assert all(" rows, " in line for line in said.splitlines()[1:]), said  # progress, and nothing of Ray's own
    check_output(trained, tmp_path)


@pytest.mark.ray
@pytest.mark.slow
def test_on_ray_mistakes_are_one_line_and_a_piece_that_kills_workers_ends_it(
    trained: Trained, tmp_path: Path, ray_address: str
) -> None:
    ray = ["--workers", "2", "--address", ray_address, "--with"]
    line = "logits = model(pixels"
    bad = variant(tmp_path, line, f"if 'domestic_cat_s_000907.png' in str(batch['image']): 1 / 0\n    {line}")
    done = predict(trained, tmp_path, *ray, bad)
    assert done.returncode == 2 and "row 0 of test-00000-of-00001.parquet: predict.py line" in done.stderr
    assert "ZeroDivisionError: division by zero (on node" in done.stderr and done.stderr.count("\n") == 1
    deadly = variant(tmp_path, line, f"os.kill(os.getpid(), signal.SIGKILL)\n    {line}")
    done = predict(trained, tmp_path, *ray, deadly, "--output", "other")
    assert done.returncode == 2 and "the worker died 3 times over rows" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "fsdp2", "zero3"])
def test_whatever_saved_the_checkpoint(tmp_path: Path, strategy: str) -> None:
    trained = train(tmp_path, "--workers", "2", "--strategy", strategy)
    _check(predict(trained, tmp_path))
    check_output(trained, tmp_path)


@pytest.mark.slow
def test_run_data_and_output_in_an_object_store(trained: Trained, tmp_path: Path, network: FlakyNetwork) -> None:
    store = pytest.importorskip("s3fs").S3FileSystem()
    store.put(str(TEST_SET), f"{BUCKET}/images/{TEST_SET.name}")
    store.put(str(trained.storage), f"{BUCKET}/runs", recursive=True)
    there = ["--storage", URL, "--data", f"s3://{BUCKET}/images", "--output", f"s3://{BUCKET}/out"]
    _check(predict(trained, tmp_path, *there))
    store.rm(f"{BUCKET}/out/part-000002.parquet")
    assert "7,500 of 10,000 rows are there" in _check(predict(trained, tmp_path, *there))
    store.get(f"{BUCKET}/out", str(tmp_path / "out"), recursive=True)
    check_output(trained, tmp_path)


@pytest.mark.ray
@pytest.mark.slow
def test_on_ray_the_command_is_killed_and_goes_on(trained: Trained, tmp_path: Path, ray_address: str) -> None:
    ray = ["--workers", "1", "--address", ray_address]
    first = subprocess.Popen(command(trained, *ray), cwd=tmp_path, stderr=subprocess.DEVNULL)
    try:
        _wait_for_parts(first, tmp_path, 1)
    finally:
        first.kill()
        first.wait()
    assert parts(tmp_path) < NUM_PARTS
    said = _check(predict(trained, tmp_path, *ray))
    assert "rows are there; going on with step 30" in said
    check_output(trained, tmp_path)


@pytest.mark.slow
def test_killed_at_any_moment_it_goes_on(trained: Trained, tmp_path: Path) -> None:
    draw = random.Random("moments")
    num_killed = 0
    for _ in range(8):
        process = subprocess.Popen(command(trained, "--batch-size", "16"), cwd=tmp_path, stderr=subprocess.DEVNULL)
        try:
            process.wait(draw.uniform(1.0, 6.0))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            num_killed += 1
    assert num_killed >= 2
    _check(predict(trained, tmp_path))
    check_output(trained, tmp_path)


def _wait_for_parts(process: subprocess.Popen[bytes], folder: Path, count: int) -> None:
    until = time.monotonic() + 120
    while parts(folder) < count:
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.05)
