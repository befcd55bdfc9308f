"""Lesson 03: FSDP, FSDP2 and ZeRO train alike, raw and with keepstep, and go on after a kill."""

from __future__ import annotations

import io
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from workshop.conftest import WORKSHOP, Runner, pictures, text

LESSON = "03-fsdp-pytorch-ray-deepspeed"
EPOCHS = 2
SIZES = ("--epochs", EPOCHS, "--limit", 256)
RAY = {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2"}  # how often reports are looked for: 2 s otherwise


def metrics(output: Path) -> list[tuple[float, ...]]:
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == list(range(len(lines)))
    return [(line["train_loss"], line["test_loss"], line["accuracy"]) for line in lines]


def same(found: list[tuple[float, ...]], expected: list[tuple[float, ...]]) -> bool:
    return len(found) == len(expected) and all(
        a == pytest.approx(b, rel=1e-5) for a, b in zip(found, expected, strict=True)
    )


@pytest.fixture(scope="module")
def plain(data: str) -> list[tuple[float, ...]]:
    """What one process without any of it trains: the reference."""
    code = f"""
import sys, json
sys.path.insert(0, {str(WORKSHOP)!r})
import torch, torch.nn.functional as F
from common.tasks import TASKS
torch.set_num_threads(1)
torch.manual_seed(0)
task = TASKS["vit"]
model = task.model(small=True)
optimizer = task.make_optimizer(model, None)
train, test = task.datasets(None, 256)
for epoch in range({EPOCHS}):
    order = torch.randperm(256, generator=torch.Generator().manual_seed(epoch))
    total = 0.0
    for batch in order.split(128):
        images, labels = train[batch]
        loss = F.cross_entropy(model(task.normalise(images)), labels)
        optimizer.zero_grad(); loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0); optimizer.step()
        total += loss.item() * len(batch)
    with torch.no_grad():
        logits = model(task.normalise(test.tensors[0]))
    right = (logits.argmax(1) == test.tensors[1]).double().mean().item()
    print(json.dumps([total / 256, F.cross_entropy(logits, test.tensors[1]).item(), right]))
"""
    environment = os.environ | {"KEEPSTEP_DATA": data}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


@pytest.mark.ray
@pytest.mark.parametrize(
    ("script", "flags"),
    [
        ("train_ray_fsdp2.py", ["--kill-at", 1, "--profile-dir", "traces"]),
        ("train_ray_deepspeed.py", ["--zero-stage", 3]),
        pytest.param("train_ray_fsdp.py", ["--kill-at", 1], marks=pytest.mark.slow),
        pytest.param("train_ray_deepspeed.py", ["--zero-stage", 1, "--kill-at", 1], marks=pytest.mark.slow),
        pytest.param("train_ray_deepspeed.py", ["--zero-stage", 2, "--kill-at", 1], marks=pytest.mark.slow),
        pytest.param("train_ray_deepspeed.py", ["--zero-stage", 3, "--kill-at", 1], marks=pytest.mark.slow),
    ],
)
def test_raw(run_lesson: Runner, ray_address: str, plain: Any, tmp_path: Path, script: str, flags: list[Any]) -> None:
    flags = [tmp_path / flag if flag == "traces" else flag for flag in flags]
    done = run_lesson(LESSON, script, *SIZES, *flags, "--output", tmp_path, "--address", ray_address, **RAY)
    assert done.returncode == 0, done.stderr + done.stdout
    assert same(metrics(tmp_path), plain)
    if "--profile-dir" in flags:
        assert {"rank_0.json", "rank_1.json"} == {path.name for path in (tmp_path / "traces").iterdir()}


@pytest.mark.parametrize(
    "strategy",
    [
        "fsdp2",
        pytest.param("zero3"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("fsdp", "zero1", "zero2")),
    ],
)
def test_keepstep_has_the_same_losses(run_lesson: Runner, plain: Any, tmp_path: Path, strategy: str) -> None:
    launcher = (sys.executable, "-m", "keepstep", "run", "--workers", "2", "--strategy", strategy)
    launcher += ("--storage", str(tmp_path / "runs"))
    flags = ("--order", "torch", "--clip", 1.0, "--output", tmp_path)
    done = run_lesson(LESSON, "train_keepstep.py", *SIZES, *flags, launcher=launcher)
    assert done.returncode == 0, done.stderr
    assert same(metrics(tmp_path), plain)


@pytest.mark.ray
def test_fsdp2_notebook(run_notebook: Any, ray_address: str) -> None:
    made = run_notebook(LESSON, "FSDP2_RayTrain_Tutorial.ipynb", RAY_ADDRESS=ray_address, **RAY)
    check_pictures(made, 2)
    said = text(made)
    assert "are DDP's, bit for bit: True" in said
    assert "goes on with epoch 1, after 2 steps" in said


@pytest.mark.ray
def test_deepspeed_notebook(run_notebook: Any, ray_address: str) -> None:
    made = run_notebook(LESSON, "DeepSpeed_RayTrain_Tutorial.ipynb", RAY_ADDRESS=ray_address, **RAY)
    check_pictures(made, 2)
    said = text(made)
    assert "= 16.0 bytes per parameter" in said
    assert re.search(r"DDP +16 +16\.00 +256\.0 +no\b", said)  # of the table of a billion parameters
    assert re.search(r"FSDP / ZeRO-3 +4 +4\.00 +16\.0 +yes\b", said)


def check_pictures(notebook: Any, number: int) -> None:
    image = pytest.importorskip("PIL.Image")
    found = pictures(notebook)
    assert len(found) == number
    for picture in found:
        colours = image.open(io.BytesIO(picture)).convert("RGB").getcolors(1 << 24)
        assert len(colours) > 50, "an empty picture has few colours"


@pytest.mark.parametrize("notebook", ["FSDP2_RayTrain_Tutorial.ipynb", "DeepSpeed_RayTrain_Tutorial.ipynb"])
def test_notebooks_are_stored_executed(notebook: str) -> None:
    content = (WORKSHOP / LESSON / notebook).read_text()
    cells = [cell for cell in json.loads(content)["cells"] if cell["cell_type"] == "code"]
    assert all(cell["execution_count"] for cell in cells)
    assert not [cell for cell in cells for output in cell["outputs"] if output["output_type"] == "error"]
    assert len(content) < 400_000


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train_ray_fsdp.py", "--use-gpu", "True"], "torch sees no GPU here"),
        (["train_ray_fsdp2.py", "--batch-size", 255], "--batch-size 255 does not divide over 2 workers"),
        (["train_ray_fsdp2.py", "--kill-at", 0], "comes before the first checkpoint"),
        (["train_ray_deepspeed.py", "--zero-stage", 4], "invalid choice: 4"),
        (["train_ray_deepspeed.py", "--precision", "fp16", "--use-gpu", "False"], "--precision fp16 needs a GPU"),
    ],
)
def test_bad_input_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[Any], said: str
) -> None:
    if torch.cuda.is_available() and "True" in words:
        pytest.skip("there is a GPU")
    monkeypatch.syspath_prepend(WORKSHOP)
    script, *flags = words
    parse = runpy.run_path(str(WORKSHOP / LESSON / script))["parse"]
    with pytest.raises(SystemExit) as left:
        parse([str(flag) for flag in flags])
    assert left.value.code == 2
    assert said in capsys.readouterr().err


WRONG_STEP = """
import torch
def fsdp_step(shards, num_weights, gradient, lr):
    size = len(shards[0])
    weights = torch.cat(shards)[:num_weights]
    total = sum(gradient(weights, rank) for rank in range(len(shards)))
    total = torch.nn.functional.pad(total, [0, size * len(shards) - num_weights])
    return [shard - lr * part for shard, part in zip(shards, total.split(size))]
"""
WRONG_MEMORY = """
def bytes_per_gpu(num_parameters, num_gpus, strategy, mixed=False):
    return num_parameters * (16 if strategy == "ddp" else 16 / num_gpus)
def gpus_needed(num_parameters, gpu_bytes, strategy, mixed=False):
    return 1
"""
WRONG_NEWEST = """
def newest_checkpoint(folder, num_workers):
    return max((path.name for path in folder.glob("epoch_*")), key=lambda name: int(name[6:]))
"""


@pytest.mark.parametrize(
    ("name", "answer", "hint"),
    [
        ("1_fsdp_step", WRONG_STEP, "added up"),
        ("2_memory", WRONG_MEMORY, "'zero1'"),
        ("3_newest_checkpoint", WRONG_NEWEST, "epoch_11 lacks rank 1's file"),
    ],
)
def test_wrong_answers_get_a_hint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, answer: str, hint: str
) -> None:
    monkeypatch.syspath_prepend(WORKSHOP)
    from common.checks import judge

    (tmp_path / f"{name}.py").write_text(answer)
    (found,) = judge(WORKSHOP / LESSON / "exercises", tmp_path)
    assert not found.right and hint in found.hint
