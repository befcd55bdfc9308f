"""Lesson 03: FSDP, FSDP2 and ZeRO train alike, raw and with keepstep, and go on after a kill."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from workshop.conftest import WORKSHOP, Runner

LESSON = "03-fsdp-pytorch-ray-deepspeed"
EPOCHS = 2
SIZES = ("--epochs", EPOCHS, "--limit", 256)


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
    done = run_lesson(LESSON, script, *SIZES, *flags, "--output", tmp_path, "--address", ray_address)
    assert done.returncode == 0, done.stderr + done.stdout
    assert same(metrics(tmp_path), plain)
    if "--profile-dir" in flags:
        assert {"rank_0.json", "rank_1.json"} == {path.name for path in (tmp_path / "traces").iterdir()}
