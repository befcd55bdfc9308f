"""Saves are written beside training, committed whole, one at a time, and what went wrong is said."""

from __future__ import annotations

import errno
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from keepstep.checkpoint.dcp import INDEX, Reader, rank_file
from keepstep.checkpoint.saver import STATE, Saver
from keepstep.checkpoint.store import Manifest, Store
from keepstep.checkpoint.tree import put_together, tensor_keys
from keepstep.errors import CheckpointError


class Slow(Store):
    """A store whose commits wait until they may, or fail."""

    def __init__(self, root: Path, keep: int) -> None:
        super().__init__(root, keep)
        self.may_commit = threading.Event()
        self.may_commit.set()
        self.error: Exception | None = None

    def commit(self, folder: Path, manifest: Manifest) -> Path:
        assert self.may_commit.wait(10)
        if self.error is not None:
            raise self.error
        return super().commit(folder, manifest)


@pytest.fixture
def store(tmp_path: Path) -> Slow:
    return Slow(tmp_path / "checkpoints", keep=2)


def make_saver(store: Store, in_background: bool = True, committed: list[int] | None = None) -> Saver:
    noted = committed if committed is not None else []
    return Saver(store, 0, None, "nonce", in_background, lambda manifest, seconds: noted.append(manifest.step))


def save(saver: Saver, step: int, wait: bool = False, **state: Any) -> None:
    saver.save(Manifest(step, 0, 1, "single"), {"model": {"w": torch.ones(2)}, **state}, {"rng": torch.ones(1)}, wait)


def read(store: Store, step: int) -> dict[str, Any]:
    folder = store.path(step)
    skeleton = json.loads((folder / STATE).read_text())
    reader = Reader(folder)
    targets = {}
    for key in tensor_keys(skeleton):
        shape, dtype = reader.shape_and_dtype(key)
        targets[key] = torch.empty(shape, dtype=dtype)
    reader.load(targets)
    state: dict[str, Any] = put_together(skeleton, targets)
    return state


@pytest.mark.parametrize("in_background", [True, False])
def test_a_save_is_committed_whole(store: Slow, in_background: bool) -> None:
    committed: list[int] = []
    saver = make_saver(store, in_background, committed)
    weight = torch.arange(3.0)
    save(saver, 5, model={"w": weight}, run={"step": 5, "betas": (0.9, 0.99)})
    saver.wait()
    store.check(5)
    assert committed == [5]
    state = read(store, 5)
    assert torch.equal(state["model"]["w"], weight)
    assert state["run"] == {"step": 5, "betas": (0.9, 0.99)}
    manifest = store.read_manifest(5)
    assert set(manifest.files) == {STATE, INDEX, rank_file(0)}
    assert manifest.torch == torch.__version__ and time.time() - manifest.created < 60


def test_every_file_of_a_checkpoint_is_in_its_manifest(store: Slow) -> None:
    """Else a deleted one would not be missed."""
    saver = make_saver(store, in_background=False)
    saver.save(Manifest(1, 0, 1, "single"), {"run": {"step": 1}}, {"nothing": None}, wait=True)
    on_disk = {path.name for path in store.path(1).iterdir()} - {"manifest.json"}
    assert set(store.read_manifest(1).files) == on_disk


def test_training_goes_on_while_a_save_is_written(store: Slow) -> None:
    saver = make_saver(store)
    store.may_commit.clear()
    weight = torch.zeros(2)
    save(saver, 1, model={"w": weight})
    weight.fill_(9.0)
    assert store.steps() == [] and saver.has(1)
    store.may_commit.set()
    saver.wait()
    assert read(store, 1)["model"]["w"].tolist() == [0.0, 0.0]


def test_a_save_that_must_be_there_is_waited_for(store: Slow) -> None:
    saver = make_saver(store)
    save(saver, 1, wait=True)
    assert store.steps() == [1]


def test_a_second_save_waits_for_the_first(store: Slow) -> None:
    """One at a time: the host memory is shared, and nothing piles up."""
    saver = make_saver(store)
    store.may_commit.clear()
    save(saver, 1)
    second = threading.Thread(target=save, args=(saver, 2))
    second.start()
    second.join(0.1)
    assert second.is_alive() and not saver.has(2)
    store.may_commit.set()
    second.join(10)
    saver.wait()
    assert store.steps() == [1, 2]


def test_an_error_beside_training_is_raised_once_at_the_next_boundary(store: Slow) -> None:
    saver = make_saver(store)
    save(saver, 1, wait=True)
    store.error = OSError(errno.EIO, "Input/output error")
    save(saver, 2)
    with pytest.raises(CheckpointError) as error:
        saver.wait()
    assert "the checkpoint of step 2 could not be written" in str(error.value)
    assert "Input/output error" in str(error.value)
    assert "the newest good one is step 1" in str(error.value)
    saver.raise_error()


def test_a_boundary_sees_the_error_without_waiting(store: Slow) -> None:
    saver = make_saver(store)
    store.error = OSError(errno.EIO, "Input/output error")
    save(saver, 1)
    deadline = time.monotonic() + 10
    with pytest.raises(CheckpointError, match="there is none before it"):
        while time.monotonic() < deadline:
            saver.raise_error()
            time.sleep(0.005)


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOSPC, "make room, or lower --keep, and start the same command again"),
        (errno.EDQUOT, "make room, or lower --keep"),
        (errno.EACCES, "make the folder writable, or give another --storage"),
        (errno.EROFS, "make the folder writable, or give another --storage"),
    ],
)
@pytest.mark.parametrize("in_background", [True, False])
def test_an_error_says_what_to_do(store: Slow, number: int, advice: str, in_background: bool) -> None:
    saver = make_saver(store, in_background)
    store.error = OSError(number, "what the system says")
    with pytest.raises(CheckpointError) as error:
        save(saver, 3)
        saver.wait()
    assert advice in str(error.value)


def test_a_save_that_failed_leaves_no_checkpoint(store: Slow) -> None:
    saver = make_saver(store, in_background=False)
    store.error = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(CheckpointError):
        save(saver, 3)
    assert store.steps() == []


def test_state_that_cannot_be_held_is_refused_before_anything_is_written(store: Slow) -> None:
    saver = make_saver(store)
    with pytest.raises(CheckpointError, match="the state at 'tracked/ema' holds a"):
        save(saver, 3, tracked={"ema": object()})
    assert not store.root.exists() and not saver.has(3)


def test_old_checkpoints_go_as_new_ones_come(store: Slow) -> None:
    saver = make_saver(store)
    for step in (1, 2, 3, 4):
        save(saver, step)
    saver.wait()
    assert store.steps() == [3, 4]


def test_the_steps_that_are_saved_are_known(store: Slow) -> None:
    save(make_saver(store), 1, wait=True)
    save(make_saver(store), 2, wait=True)
    saver = make_saver(store)
    assert saver.has(1) and saver.has(2) and not saver.has(3)
    saver.forget_after(1)
    assert saver.has(1) and not saver.has(2)


def test_state_of_a_new_shape_is_saved_as_it_is_now(store: Slow) -> None:
    """Optimizers begin without state; host memory that was kept from the last save must not stand in its way."""
    saver = make_saver(store)
    save(saver, 1, optimizer={"state": {}})
    save(saver, 2, model={"w": torch.full((3,), 2.0)}, optimizer={"state": {"w": {"m": torch.ones(3)}}})
    save(saver, 3, model={"w": torch.full((2,), 3.0)})
    saver.wait()
    assert read(store, 2)["optimizer"]["state"]["w"]["m"].tolist() == [1.0, 1.0, 1.0]
    assert read(store, 3)["model"]["w"].tolist() == [3.0, 3.0]
    assert "optimizer" not in read(store, 3)


def test_warming_up_ends_by_itself(store: Slow) -> None:
    make_saver(store).warm_up(None)
    for thread in threading.enumerate():
        if thread.name == "keepstep-warm-up":
            assert not thread.daemon
            thread.join(20)
            assert not thread.is_alive()
