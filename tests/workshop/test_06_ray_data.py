"""Lesson 06: images in Parquet files through Ray Data, each row exactly once with keepstep."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from workshop.conftest import pictures
from workshop.notebook_tables import outputs, table

WORKSHOP = Path(__file__).parents[2] / "workshop"
sys.path.insert(0, str(WORKSHOP))

from common import consumed, parquet, record  # noqa: E402  # the lessons' folder is no package
from common.checks import judge  # noqa: E402

LESSON = "06-ray-data"
SMALL = ("--epochs", 1, "--limit", 256, "--batch-size", 32, "--seed", 6, "--pace", 0.1)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """200 rows: the last batch is smaller, and so is the last file."""
    from common.tasks import TASKS

    folder = tmp_path_factory.mktemp("images")
    train_set, _ = TASKS["resnet"].datasets(None, 200)
    parquet.write(train_set, folder, rows_per_file=32)
    return folder


@pytest.mark.parametrize("task", ["resnet", "vit"])
def test_what_is_written_is_what_is_read(task: str, run_lesson: Any, tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    from common.tasks import TASKS

    done = run_lesson(
        LESSON, "images_to_parquet.py", "--task", task, "--limit", 50, "--rows-per-file", 20, "--output", tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "50 images in 3 files" in done.stdout
    table = pq.read_table(tmp_path / "images" / task).to_pydict()
    assert table["id"] == list(range(50))
    train_set, _ = TASKS[task].datasets(None, 50)
    decoded = parquet.decode({"image": table["image"]})["image"]
    assert (decoded == train_set.tensors[0].numpy()).all()
    assert table["label"] == train_set.tensors[1].tolist()


@pytest.mark.ray
def test_each_row_once_over_a_kill_and_fewer_workers(
    run_lesson: Any, ray_address: str, images: Path, tmp_path: Path
) -> None:
    words = ("keepstep", *SMALL, "--checkpoint-every", 2, "--then-workers", 1, "--images", images)
    done = run_lesson(LESSON, "count_rows.py", *words, "--output", tmp_path, RAY_ADDRESS=ray_address)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "200 once, 0 repeated, 0 lost" in done.stdout
    first, second = consumed.attempts(tmp_path / "keepstep-then-1")
    assert sorted(first.pids) == [0, 1]
    assert sorted(second.pids) == [0]
    assert second.from_step > 0


@pytest.mark.ray
def test_both_versions_train_the_same_in_the_files_order(
    run_lesson: Any, ray_address: str, images: Path, tmp_path: Path
) -> None:
    words = (*SMALL, "--pace", 0, "--no-shuffle", "--images", images, "--output", tmp_path)
    raw = run_lesson(LESSON, "train_ray_data.py", *words, "--num-workers", 1, RAY_ADDRESS=ray_address)
    assert raw.returncode == 0, raw.stdout + raw.stderr
    launcher = (sys.executable, "-m", "keepstep", "run", "--name", "kept", "--storage", str(tmp_path / "runs"))
    kept = run_lesson(LESSON, "train_keepstep.py", *words, launcher=launcher, RAY_ADDRESS=ray_address)
    assert kept.returncode == 0, kept.stdout + kept.stderr
    assert consumed.tally(tmp_path / "raw", 200, 1).exactly_once
    assert consumed.tally(tmp_path / "kept", 200, 1).exactly_once
    (ours,), (theirs,) = record.read(tmp_path / "kept"), record.read(tmp_path / "raw")
    for name in ("train_loss", "test_loss", "accuracy"):
        assert ours[name] == pytest.approx(theirs[name], rel=1e-5)


@pytest.mark.ray
@pytest.mark.slow
def test_raw_ray_repeats_rows_after_a_kill(run_lesson: Any, ray_address: str, images: Path, tmp_path: Path) -> None:
    words = ("raw", *SMALL, "--pace", 0.3, "--checkpoint-every", 2, "--images", images, "--output", tmp_path)
    done = run_lesson(LESSON, "count_rows.py", *words, RAY_ADDRESS=ray_address)
    assert done.returncode == 0, done.stdout + done.stderr
    assert consumed.tally(tmp_path / "raw-again-then-same", 200, 1).repeated > 0


def test_bad_input_says_what_to_do(run_lesson: Any, tmp_path: Path) -> None:
    done = run_lesson(LESSON, "count_rows.py", "raw", "--output", tmp_path)
    assert "has no Parquet files: python images_to_parquet.py writes them" in done.stderr
    done = run_lesson(LESSON, "images_to_parquet.py", "--rows-per-file", 0)
    assert "1 are the least" in done.stderr
    done = run_lesson(LESSON, "train_ray_data.py", "--batch-size", 31)
    assert "does not divide by 2 workers" in done.stderr


@pytest.mark.parametrize(
    ("number", "source", "hint"),
    [
        (1, "def scale(batch):\n    return {**batch, 'image': batch['image'] / 127.5 - 1}\n", "float32 was asked for"),
        (1, "def scale(batch):\n    return {**batch, 'image': batch['image'].astype(np.float32) / 255}\n", "become -1"),
        (2, "def flip(batch, seed, epoch):\n    return {**batch, 'image': batch['image'][..., ::-1]}\n", "about half"),
        (2, "def flip(batch, seed, epoch, right=flip):\n    return right(batch, seed, 0)\n", "same flips as epoch 0"),
        (2, "def flip(batch, seed, epoch, right=flip):\n    return right(batch, 0, epoch)\n", "another seed"),
    ],
)
def test_wrong_answers_get_a_hint(number: int, source: str, hint: str, tmp_path: Path) -> None:
    exercises = WORKSHOP / LESSON / "exercises"
    (solution,) = (exercises / "solutions").glob(f"{number}_*.py")
    (tmp_path / solution.name).write_text(f"{solution.read_text()}\n\n{source}")
    (judged,) = judge(exercises, tmp_path)
    assert not judged.right
    assert hint in judged.hint


def test_the_notebook_is_stored_with_its_results() -> None:
    nbformat = pytest.importorskip("nbformat")
    check_notebook(nbformat.read(WORKSHOP / LESSON / "Ray_Data.ipynb", as_version=4))


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_notebook_runs(run_notebook: Any) -> None:
    env = {"WORKSHOP_EPOCHS": "2", "WORKSHOP_LIMIT": "1024"}  # steps enough for a kill between checkpoints
    check_notebook(run_notebook(LESSON, "Ray_Data.ipynb", timeout=1200, **env))


def check_notebook(notebook: Any) -> None:
    """What it claims is what it shows: after a kill raw trainings repeat or lose rows, keepstep's does not."""
    assert len(pictures(notebook)) == 3
    assert all(len(picture) > 5000 for picture in pictures(notebook))
    assert not [output for output in outputs(notebook) if output["output_type"] == "error"]
    rows = table(notebook, "repeated")
    assert rows["raw, again"]["repeated"] > 0
    assert rows["raw, skip, then 1 worker"]["repeated"] + rows["raw, skip, then 1 worker"]["lost"] > 0
    assert rows["keepstep, then 1 worker"]["repeated"] == rows["keepstep, then 1 worker"]["lost"] == 0
