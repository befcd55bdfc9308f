"""Lesson 11: one process, Ray Data, actors and keepstep predict say the same of every image."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from workshop.conftest import pictures, text

WORKSHOP = Path(__file__).parents[2] / "workshop"
LESSON = "11-inference"

Shell = Callable[..., subprocess.CompletedProcess[str]]


def load(path: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A file of the lesson as a module."""
    monkeypatch.syspath_prepend(str(WORKSHOP))
    from common.checks import load as load_file

    return load_file(WORKSHOP / LESSON / path)


@pytest.fixture(scope="module")
def shell(data: str, tmp_path_factory: pytest.TempPathFactory) -> Shell:
    """Runs Python in a learner's copy of the lesson, in which a model is trained and exported, and images are made."""
    root = tmp_path_factory.mktemp("workshop")
    for name in ("common", LESSON):
        shutil.copytree(WORKSHOP / name, root / name, ignore=shutil.ignore_patterns("output"))

    def run(*words: Any, code: int = 0, **env: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"KEEPSTEP_DATA": data, "OMP_NUM_THREADS": "1"} | env
        command = [sys.executable, *map(str, words)]
        done = subprocess.run(command, cwd=root / LESSON, env=environment, capture_output=True, text=True, timeout=200)
        assert done.returncode == code, done.stdout + done.stderr
        return done

    run("train.py", "--epochs", 1, "--limit", 256, "--lr", "1e-2", "--use-gpu", "False")
    run("-m", "keepstep", "export", "digits", "--storage", "output/runs", "--output", "output/model.safetensors")
    run("make_images.py", "--limit", 300, "--files", 3)
    run("predict_direct.py")
    return run


@pytest.mark.ray
def test_all_ways_say_the_same_of_every_image(shell: Shell, ray_address: str) -> None:
    env = {"RAY_ADDRESS": ray_address, "RAY_AUTH_MODE": "disabled"}
    batch = shell("predict_batch.py", "--num-workers", 2, "--batch-size", 32, **env)
    assert "300 images" in batch.stdout
    actor = shell("predict_actor.py", "--requests", 300, "--clients", 16, **env)
    assert "all ways gave the same answers" in actor.stdout
    speeds = {line.rsplit(maxsplit=3)[0]: float(line.split()[-3].replace(",", ""))
              for line in actor.stdout.splitlines()[1:5]}  # fmt: skip
    assert speeds["64 images a request, 4 clients"] > speeds["one image a request, one client"]
    words = ["predict", "digits", "--storage", "output/runs", "--data", "output/images", "--with", "predict.py"]
    shell("-m", "keepstep", *words, "--output", "output/predictions/keepstep", "--workers", 2, **env)
    folders = [f"output/predictions/{name}" for name in ("direct", "ray_data", "actor", "keepstep")]
    compared = shell("compare.py", *folders)
    assert [line.split()[:2] for line in compared.stdout.splitlines()[1:]] == [
        ["direct", "300"], ["ray_data", "300"], ["actor", "300"], ["keepstep", "300"]]  # fmt: skip
    assert compared.stdout.count("same classes") == 4


@pytest.mark.ray
def test_the_notebook(run_notebook: Callable[..., Any], ray_address: str) -> None:
    made = run_notebook(LESSON, "Inference.ipynb", RAY_ADDRESS=ray_address, RAY_AUTH_MODE="disabled",
                        WORKSHOP_REQUESTS="128")  # fmt: skip
    assert [len(picture) > 10_000 for picture in pictures(made)] == [True]
    said = text(made)
    for way in ("Ray Data", "actors", "keepstep predict"):
        assert f"{way}: same classes as in one process: True" in said


def test_compare_finds_what_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    pd = pytest.importorskip("pandas")
    compare = load("compare.py", monkeypatch)
    first = pd.DataFrame({"id": [0, 1, 2], "predicted": [5, 6, 7], "probability": [0.5, 0.6, 0.7]})
    assert compare.differences(first, first.copy()) == []
    other = first.assign(predicted=[5, 6, 8])
    assert compare.differences(first, other) == ["1 images have another class"]
    assert compare.differences(first, first.assign(probability=[0.5, 0.6, 0.71])) == [
        "probabilities differ by up to 1.0e-02"
    ]
    assert compare.differences(first, first[:2]) == ["1 images are missing, 0 are too many"]
    assert compare.differences(first, pd.concat([first, first[:1]])) == ["1 images are there more than once"]


def test_the_actor_closes_a_batch_when_it_is_full_or_has_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    script = load("predict_actor.py", monkeypatch)
    sizes: list[int] = []

    class Fake:
        def __init__(self, *_: Any) -> None:
            pass

        def __call__(self, pngs: list[bytes]) -> dict[str, Any]:
            sizes.append(len(pngs))
            if b"bad" in pngs:
                raise OSError("no PNG")
            return {"predicted": np.array([len(png) for png in pngs]), "probability": np.ones(len(pngs))}

    monkeypatch.setattr(script, "Classifier", Fake)

    async def ask() -> list[Any]:
        server = script.BatchingServer("", False, max_size=4, wait_s=0.05)
        answers = await asyncio.gather(*(server.predict(b"x" * k) for k in range(10)))
        failed = await asyncio.gather(server.predict(b"bad"), server.predict(b"x"), return_exceptions=True)
        return [*answers, *map(str, failed)]

    *answers, first, second = asyncio.run(ask())
    assert answers == [(k, 1.0) for k in range(10)]
    assert sizes == [4, 4, 2, 2]
    assert first == second == "no answer for this batch of 2 images: no PNG"


def test_what_is_missing_is_named(run_lesson: Callable[..., Any], tmp_path: Path) -> None:
    done = run_lesson(LESSON, "predict_batch.py", "--output", tmp_path)
    assert done.returncode != 0
    assert "train first, with python train.py" in done.stderr
    (tmp_path / "model.json").write_text('{"task": "resnet", "small": true}')
    done = run_lesson(LESSON, "predict_direct.py", "--output", tmp_path)
    assert "keepstep export digits" in done.stderr
    done = run_lesson(LESSON, "predict_actor.py", "--output", tmp_path)
    assert "holds no Parquet files: python make_images.py" in done.stderr


def test_images_survive_the_way_through_png(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(WORKSHOP))
    from common.classifier import decode, encode

    for channels in (1, 3):
        images = torch.randint(0, 256, (5, channels, 28, 32), dtype=torch.uint8)
        assert torch.equal(decode([encode(image) for image in images]), images)


def test_typical_wrong_answers_are_told_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = load("exercises/checks.py", monkeypatch)
    wrong = sys.modules["common.checks"].Wrong
    mean, std = torch.tensor(checks.MEAN), torch.tensor(checks.STD)

    def not_scaled(photos: np.ndarray) -> torch.Tensor:
        return ((torch.from_numpy(photos).float() - mean) / std).permute(0, 3, 1, 2)

    def reshaped(photos: np.ndarray) -> torch.Tensor:
        images = (torch.from_numpy(photos) / 255 - mean) / std
        return images.reshape(len(images), 3, *images.shape[1:3])

    for answer, hint in ((not_scaled, "between 0 and 1"), (reshaped, "permute")):
        with pytest.raises(wrong, match=hint):
            checks.check_1(SimpleNamespace(prepare=answer))

    def leaves_eval(model: Any, images: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return model.eval()(images).argmax(1)

    def with_graph(model: Any, images: torch.Tensor) -> torch.Tensor:
        before = model.training
        found = model.eval()(images).argmax(1)
        model.train(before)
        return found

    for answer, hint in ((leaves_eval, "training goes on"), (with_graph, "graph")):
        with pytest.raises(wrong, match=hint):
            checks.check_2(SimpleNamespace(predict=answer))

    def from_the_last(arrivals: list[float], max_size: int, wait_s: float) -> list[list[float]]:
        made: list[list[float]] = []
        for at in arrivals:
            if made and len(made[-1]) < max_size and at < made[-1][-1] + wait_s:
                made[-1].append(at)
            else:
                made.append([at])
        return made

    with pytest.raises(wrong, match="starts the clock"):
        checks.check_3(SimpleNamespace(batches=from_the_last))
