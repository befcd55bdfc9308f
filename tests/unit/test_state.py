"""What a checkpoint holds, that it is of these very objects, and which one is resumed from."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from keepstep.checkpoint.saver import STATE, Saver
from keepstep.checkpoint.store import Manifest, Store
from keepstep.collective import Collective
from keepstep.config import StrategyConfig
from keepstep.data.loader import Batch, Loader
from keepstep.errors import CheckpointError, CheckpointUnreadable, ConfigError
from keepstep.state import TrainingState, load, newest_good
from keepstep.strategies import Setup, make_strategy
from keepstep.strategies.optimizer import PreparedOptimizer

CPU = torch.device("cpu")
ALONE = Collective(1, CPU)
RunRanks = Callable[[int, Callable[[Any, int], Any]], list[Any]]


class Ema:
    """Something to track."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def make_state(
    width: int = 2, lr: float = 0.1, tracked: dict[str, Any] | None = None, schedule: bool = True
) -> TrainingState:
    """A model, its optimizer and scheduler, and a loader, as `run.prepare` puts them together."""
    state = TrainingState()
    model = nn.Linear(width, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    if schedule:
        state.schedulers["scheduler"] = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    prepared = PreparedOptimizer(optimizer, None)
    prepared.remember_names({"model": dict(model.named_parameters())})
    state.models["model"] = make_strategy("single", Setup(StrategyConfig(), CPU, 1, 1)).prepare(model)
    prepared.reconnect(state.models)
    state.optimizers["optimizer"] = prepared
    loader: DataLoader[Any] = DataLoader(range(8), batch_size=2)  # type: ignore[arg-type]
    state.loaders["loader"] = Loader(loader, 0, 0, 1, CPU)
    for name, value in (tracked or {}).items():
        state.track(name, value)
    return state


def train(state: TrainingState, steps: int = 2, samples: Iterator[Batch] | None = None) -> Iterator[Batch]:
    """Trains on the next samples of a pass; returns the rest of it."""
    model, optimizer = state.models["model"].module, state.optimizers["optimizer"].optimizer
    samples = samples or state.loaders["loader"].training_pass()
    for _ in range(steps):
        batch = next(samples)
        model(batch.data.float()[None]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        for scheduler in state.schedulers.values():
            scheduler.step()  # type: ignore[attr-defined]
        state.loaders["loader"].offset += 1
    return samples


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path, keep=9)


def save(store: Store, step: int, state: TrainingState) -> None:
    saver = Saver(store, 0, None, "nonce", False, lambda manifest, seconds: None)
    saver.save(Manifest(step, 0, 1, "single"), {**state.capture(), "run": {"step": step}}, {"rng": torch.ones(3)}, True)


def test_everything_that_was_prepared_or_tracked_comes_back(store: Store) -> None:
    state = make_state(tracked={"ema": Ema(torch.arange(3.0)), "note": Ema({"best": (1, 2)})})
    rest = train(state)
    save(store, 2, state)
    ema, note = Ema(torch.zeros(3)), Ema(None)
    other = make_state(tracked={"ema": ema, "note": note})
    loaded = load(store, 2, other, rank=0)
    assert (loaded.step, loaded.world_size, loaded.state["run"]) == (2, 1, {"step": 2})
    assert loaded.rank_state is not None and loaded.rank_state["rng"].tolist() == [1.0, 1.0, 1.0]
    assert ema.value.tolist() == [0.0, 1.0, 2.0] and note.value == {"best": (1, 2)}
    assert other.optimizers["optimizer"].optimizer.param_groups[0]["lr"] == 0.025
    assert other.loaders["loader"].offset == 2
    train(state, 2, rest)
    train(other, 2)
    for a, b in zip(state.models["model"].state().values(), other.models["model"].state().values(), strict=True):
        assert torch.equal(a, b)


def test_a_rank_that_did_not_save_has_no_state_of_its_own(store: Store) -> None:
    state = make_state()
    train(state)
    save(store, 2, state)
    assert load(store, 2, make_state(), rank=1).rank_state is None


def unchanged(state: TrainingState, action: Callable[[], Any], complaint: str) -> None:
    before = {name: value.clone() for name, value in state.models["model"].state().items()}
    with pytest.raises(CheckpointError, match=complaint):
        action()
    assert all(torch.equal(value, before[name]) for name, value in state.models["model"].state().items())


def test_another_models_checkpoint_is_refused_and_nothing_is_changed(store: Store) -> None:
    state = make_state()
    train(state)
    save(store, 2, state)
    wider = make_state(width=4)
    unchanged(
        wider,
        lambda: load(store, 2, wider, 0),
        r"the checkpoint step_00000002 is of another model: 'model/weight' is \(1, 2\) there and \(1, 4\) here",
    )
    renamed = make_state()
    renamed.models["model"].module.add_module("extra", nn.Linear(1, 1))
    unchanged(
        renamed,
        lambda: load(store, 2, renamed, 0),
        r"it lacks 2 of this model's tensors \(as extra.bias\) and has 0 that this model lacks; start this one under",
    )


def test_another_scripts_checkpoint_is_refused(store: Store) -> None:
    save(store, 1, make_state())
    without = make_state(schedule=False)
    with pytest.raises(CheckpointError, match=r"has schedulers \['scheduler'\], this script prepares \[\]"):
        load(store, 1, without, 0)
    two = make_state()
    two.optimizers["optimizer_2"] = two.optimizers["optimizer"]
    with pytest.raises(CheckpointError, match="has no optimizer_2; it is of another script"):
        load(store, 1, two, 0)


def test_tracking_more_than_was_saved_begins_anew(store: Store) -> None:
    save(store, 1, make_state())
    added = Ema("fresh")
    load(store, 1, make_state(tracked={"added": added}), 0)
    assert added.value == "fresh"


def test_what_has_no_state_cannot_be_tracked() -> None:
    with pytest.raises(ConfigError, match=r"run.track\('x', ...\) got a int, which lacks state_dict\(\)"):
        TrainingState().track("x", 3)


def test_a_name_is_tracked_once() -> None:
    state = make_state(tracked={"ema": Ema(1)})
    with pytest.raises(ConfigError, match=r"run.track\('ema', ...\) was called twice"):
        state.track("ema", Ema(2))


def test_names_follow_the_order_of_preparation() -> None:
    taken: dict[str, Any] = {}
    for _ in range(3):
        taken[TrainingState.next_name("model", taken)] = None
    assert list(taken) == ["model", "model_2", "model_3"]


def test_the_newest_good_checkpoint_is_chosen_and_bad_ones_are_named(store: Store) -> None:
    for step in (1, 2, 3, 4):
        save(store, step, make_state())
    (store.path(4) / STATE).unlink()
    (store.path(3) / "manifest.json").write_text("{")
    step, passed_over = newest_good(store, ALONE, 0, 1)
    assert step == 2
    assert [problem.partition("/")[0] for problem in passed_over] == ["step_00000004", "step_00000003"]


def test_without_a_good_checkpoint_there_is_none(store: Store) -> None:
    assert newest_good(store, ALONE, 0, 1) == (None, [])
    save(store, 1, make_state())
    (store.path(1) / "manifest.json").unlink()
    assert newest_good(store, ALONE, 0, 1) == (None, ["step_00000001 has no manifest.json"])


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ESTALE, errno.ETIMEDOUT, errno.EMFILE])
def test_what_cannot_be_read_now_is_no_reason_to_go_further_back(
    store: Store, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    save(store, 1, make_state())
    save(store, 2, make_state())
    (store.path(2) / "manifest.json").write_text("{")  # provably bad, and yet the older one must be known to be good

    def fail(path: Path) -> str:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("keepstep.checkpoint.store.digest", fail)
    with pytest.raises(CheckpointUnreadable) as error:
        newest_good(store, ALONE, 0, 1)
    assert str(error.value).startswith("step_00000001/") and os.strerror(number) in str(error.value)
    assert "nothing was changed" in str(error.value)


def test_a_newer_format_is_no_damage_unless_it_is_damaged(store: Store) -> None:
    save(store, 1, make_state())
    path = store.path(1) / "manifest.json"
    text = path.read_text()
    path.write_text(replace(Manifest.from_json(text), format=3).to_json())
    with pytest.raises(CheckpointUnreadable, match="its format is 3; this keepstep reads format 1"):
        newest_good(store, ALONE, 0, 1)
    path.write_text(text.replace('"format": 1', '"format": 3'))  # one flipped bit
    assert newest_good(store, ALONE, 0, 1)[0] is None


def test_workers_agree_though_each_checks_a_part(store: Store, run_ranks: RunRanks) -> None:
    """The damage is in one file, which one worker checks: all pass it over."""
    save(store, 1, make_state())
    save(store, 2, make_state())
    for name in json.loads((store.path(2) / "manifest.json").read_text())["files"]:
        content = (store.path(2) / name).read_bytes()
        (store.path(2) / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        found = run_ranks(2, lambda collective, rank: newest_good(store, collective, rank, 2))
        assert found[0] == found[1]
        assert found[0][0] == 1 and name in found[0][1][0]
        (store.path(2) / name).write_bytes(content)
    assert run_ranks(2, lambda collective, rank: newest_good(store, collective, rank, 2)) == [(2, []), (2, [])]
