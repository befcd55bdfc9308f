"""A checkpoint becomes plain weights that `load_state_dict` takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from keepstep.checkpoint.export import choose_step, export
from keepstep.checkpoint.saver import STATE, Saver
from keepstep.checkpoint.store import Manifest, Store
from keepstep.errors import CheckpointError


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "checkpoints", keep=5)


def save(store: Store, step: int, **state: Any) -> None:
    saver = Saver(store, 0, None, "nonce", False, lambda manifest, seconds: None)
    saver.save(Manifest(step, 0, 1, "single"), state, {"rng": torch.ones(1)}, wait=True)


def test_exported_weights_are_the_models(store: Store, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    save(store, 4, model=model.state_dict(), optimizer={"state": {"0.weight": torch.ones(9)}})
    output = tmp_path / "deep" / "weights.safetensors"
    assert export(store, 4, output) == len(model.state_dict())
    other = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    other.load_state_dict(load_file(output))
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value)
    with safe_open(output, framework="pt") as file:
        assert file.metadata() == {"format": "pt", "step": "4"}
    assert [path.name for path in output.parent.iterdir()] == ["weights.safetensors"]


def test_one_of_several_models_is_exported(store: Store, tmp_path: Path) -> None:
    save(store, 1, model={"w": torch.zeros(2)}, model_2={"w": torch.ones(2)})
    export(store, 1, tmp_path / "second.safetensors", "model_2")
    assert load_file(tmp_path / "second.safetensors")["w"].tolist() == [1.0, 1.0]


def test_a_model_that_is_not_there_is_answered_with_those_that_are(store: Store, tmp_path: Path) -> None:
    save(store, 1, model={"w": torch.zeros(2)}, model_2={"w": torch.ones(2)}, schedulers={})
    with pytest.raises(CheckpointError, match=r"step_00000001 has no 'teacher'; it has model, model_2"):
        export(store, 1, tmp_path / "x", "teacher")


def test_a_damaged_checkpoint_is_not_exported(store: Store, tmp_path: Path) -> None:
    save(store, 1, model={"w": torch.zeros(2)})
    path = store.path(1) / STATE
    path.write_text(path.read_text().replace("w", "v"))
    with pytest.raises(CheckpointError, match="damaged"):
        export(store, 1, tmp_path / "out.safetensors")
    assert not (tmp_path / "out.safetensors").exists()


def test_a_failed_export_leaves_the_old_file(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(store, 1, model={"w": torch.zeros(2)})
    output = tmp_path / "w.safetensors"
    output.write_text("old")

    def fail(path: Path, *_: Any) -> None:
        path.write_text("half")
        raise OSError("disk full")

    monkeypatch.setattr("keepstep.checkpoint.export.write_safetensors", fail)
    with pytest.raises(OSError, match="disk full"):
        export(store, 1, output)
    assert output.read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "w.safetensors"]


def test_steps_are_chosen_by_word_or_number(store: Store) -> None:
    for step in (10, 20, 30):
        save(store, step, model={})
    store.remember_best(20, "accuracy", 0.9)
    assert choose_step(store, "newest") == 30
    assert choose_step(store, "best") == 20
    assert choose_step(store, "10") == 10


@pytest.mark.parametrize("which", ["15", "-1", "latest", "", "1.0", "²"])
def test_a_step_that_is_not_there_is_answered_with_those_that_are(store: Store, which: str) -> None:
    save(store, 10, model={})
    save(store, 20, model={})
    with pytest.raises(CheckpointError, match="there are steps 10, 20"):
        choose_step(store, which)


def test_without_checkpoints_there_is_nothing_to_choose(store: Store) -> None:
    with pytest.raises(CheckpointError, match="there is no checkpoint in"):
        choose_step(store, "newest")


def test_without_a_best_it_says_how_to_keep_one(store: Store) -> None:
    save(store, 10, model={})
    with pytest.raises(CheckpointError, match=r"kept no best checkpoint; it does with --keep-best METRIC:max"):
        choose_step(store, "best")


def test_a_best_whose_checkpoint_was_never_committed_is_not_chosen(store: Store) -> None:
    """It is noted before its checkpoint is written: a crash may come between."""
    save(store, 10, model={})
    store.remember_best(20, "accuracy", 0.9)
    with pytest.raises(CheckpointError, match="step 20"):
        choose_step(store, "best")
