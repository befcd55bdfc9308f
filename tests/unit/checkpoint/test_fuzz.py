"""Thousands of changed checkpoints: each is refused with a CheckpointError, or is read as what it says, and no more."""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keepstep.checkpoint import dcp
from keepstep.checkpoint.dcp import INDEX, rank_file
from keepstep.checkpoint.export import export
from keepstep.checkpoint.index import parse_index
from keepstep.checkpoint.saver import STATE
from keepstep.checkpoint.store import MANIFEST, Store
from keepstep.checkpoint.tree import put_together, tensor_keys
from keepstep.collective import Collective
from keepstep.errors import CheckpointError, KeepstepError
from keepstep.seeding import restore_rng
from keepstep.state import load, newest_good
from unit.checkpoint.forgery import STEP, make_checkpoint, read_everything, seal
from unit.checkpoint.mutation import NASTY, change_bytes, change_header, change_json
from unit.checkpoint.test_tree import same
from unit.test_state import make_state, save, train

FILES = (STATE, INDEX, MANIFEST, rank_file(0))
ROUNDS = int(os.environ.get("KEEPSTEP_FUZZ_ROUNDS", "200"))
"""Changes of each kind; each has a seed of its own, so that more of them begin with these."""


class Watch:
    """Notes which files are opened and how much memory is asked for."""

    def __init__(self) -> None:
        self.opened: set[str] = set()
        self.most_bytes = 0
        self.on = False

    def note_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        touches = event in ("open", "os.mkdir", "os.rename", "os.remove", "os.link", "os.symlink")
        if self.on and touches and not isinstance(arguments[0], int):  # a descriptor was opened before, by its name
            self.opened.add(str(arguments[0]))


WATCH = Watch()
sys.addaudithook(WATCH.note_event)  # there is no way to take it off again


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    real_empty, real_open = torch.empty, dcp.safe_open

    def empty(*size: Any, **options: Any) -> torch.Tensor:
        shape = torch.Size(size[0] if isinstance(size[0], (tuple, list)) else size)
        WATCH.most_bytes = max(WATCH.most_bytes, shape.numel() * options.get("dtype", torch.float32).itemsize)
        return real_empty(*size, **options)

    def safe_open(path: Path, **options: Any) -> Any:  # it opens where the audit hook does not see it
        WATCH.opened.add(str(path))
        return real_open(path, **options)

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(dcp, "safe_open", safe_open)
    WATCH.opened, WATCH.most_bytes = set(), 0
    return WATCH


@pytest.fixture
def no_leftovers() -> Iterator[None]:
    """Memory that nobody has filled is NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def good(tmp_path: Path) -> Store:
    return make_checkpoint(tmp_path / "good")


def rounds(good: Store, scratch: Path) -> Iterator[tuple[random.Random, Store]]:
    for seed in range(ROUNDS):
        shutil.rmtree(scratch, ignore_errors=True)
        shutil.copytree(good.root, scratch / "checkpoints")
        yield random.Random(seed), Store(scratch / "checkpoints", keep=9)


def attempt(read: Callable[[], Any], refusal: type[KeepstepError] = CheckpointError) -> Any:
    """What is read, or None where it is refused; nothing else may come out."""
    WATCH.on = True
    try:
        return read()
    except refusal as error:
        message = str(error)
    finally:
        WATCH.on = False
    assert "\n" not in message
    message.encode()  # it can be printed
    return None


def check_bounds(watch: Watch, store: Store) -> None:
    outside = [path for path in watch.opened if str(store.root.parent) not in path and "site-packages" not in path]
    assert outside == []
    assert watch.most_bytes <= sum(path.stat().st_size for path in store.path(STEP).iterdir())
    watch.opened, watch.most_bytes = set(), 0


def test_damaged_bytes_are_refused_or_do_not_matter(good: Store, tmp_path: Path, watch: Watch) -> None:
    expected, own, _ = read_everything(good)
    watch.most_bytes, watch.opened = 0, set()
    refused = 0
    for chance, store in rounds(good, tmp_path / "changed"):
        path = store.path(STEP) / chance.choice(FILES)
        path.write_bytes(change_bytes(path.read_bytes(), chance))
        found = attempt(lambda store=store: read_everything(store))
        assert found is None or (same(found[0], expected) and same(found[1], own))
        refused += found is None
        check_bounds(watch, store)
    assert refused > ROUNDS * 0.9


def test_damaged_bytes_under_right_checksums(good: Store, tmp_path: Path, watch: Watch) -> None:
    for chance, store in rounds(good, tmp_path / "changed"):
        path = store.path(STEP) / chance.choice(FILES)
        path.write_bytes(change_bytes(path.read_bytes(), chance))
        seal(store.path(STEP))
        attempt(lambda store=store: read_everything(store))
        check_bounds(watch, store)


def test_changed_structure_under_right_checksums(good: Store, tmp_path: Path, watch: Watch, no_leftovers: None) -> None:
    taken = 0
    for chance, store in rounds(good, tmp_path / "changed"):
        path = store.path(STEP) / chance.choice((STATE, INDEX, INDEX, MANIFEST))
        path.write_text(json.dumps(change_json(json.loads(path.read_text()), chance)))
        seal(store.path(STEP))
        found = attempt(lambda store=store: read_everything(store))
        for tensor in found[2].values() if found else ():
            assert not tensor.is_floating_point() or not tensor.isnan().any(), "memory that nobody has filled"
        taken += found is not None
        check_bounds(watch, store)
    assert 0 < taken < ROUNDS


def test_changed_safetensors_under_right_checksums(good: Store, tmp_path: Path, watch: Watch) -> None:
    for chance, store in rounds(good, tmp_path / "changed"):
        change_header(store.path(STEP) / rank_file(0), lambda header, chance=chance: change_json(header, chance))
        seal(store.path(STEP))
        attempt(lambda store=store: read_everything(store))
        check_bounds(watch, store)


def test_files_in_each_others_places(good: Store, tmp_path: Path) -> None:
    for chance, store in rounds(good, tmp_path / "changed"):
        one, other = (store.path(STEP) / name for name in chance.sample(FILES, 2))
        if chance.random() < 0.5:
            shutil.copy(one, other)
        else:
            content = one.read_bytes()
            one.write_bytes(other.read_bytes())
            other.write_bytes(content)
        seal(store.path(STEP))
        attempt(lambda store=store: read_everything(store))


def test_a_run_resumes_from_a_changed_checkpoint_or_says_why_not(tmp_path: Path) -> None:
    """The whole way: chosen, loaded into a model, optimizer, scheduler and loader, generators put back."""
    store = Store(tmp_path / "good", keep=9)
    state = make_state()
    train(state)
    save(store, STEP, state)
    taken = 0
    for chance, changed in rounds(store, tmp_path / "changed"):
        path = changed.path(STEP) / chance.choice((STATE, INDEX))
        path.write_text(json.dumps(change_json(json.loads(path.read_text()), chance)))
        seal(changed.path(STEP))
        step, problems = newest_good(changed, Collective(1, torch.device("cpu")), 0, 1)
        if step is None:
            assert len(problems) == 1 and "\n" not in problems[0]
            continue
        # A loader may also say, in a DataError, that the place in the data is not one of its own.
        found = attempt(lambda changed=changed, step=step: load(changed, step, make_state(), 0), KeepstepError)
        taken += found is not None
    assert 0 < taken < ROUNDS


def test_a_changed_checkpoint_is_exported_or_not(good: Store, tmp_path: Path, watch: Watch) -> None:
    for chance, store in rounds(good, tmp_path / "changed"):
        path = store.path(STEP) / chance.choice((STATE, INDEX))
        path.write_text(json.dumps(change_json(json.loads(path.read_text()), chance)))
        seal(store.path(STEP))
        output = store.root.parent / "weights.safetensors"
        assert (attempt(lambda store=store, output=output: export(store, STEP, output)) is not None) == output.exists()
        check_bounds(watch, store)


def test_changed_generators_are_put_back_or_refused(good: Store) -> None:
    _, own, _ = read_everything(good)
    plain = {**own["rng"], "torch": own["rng"]["torch"].tolist()}
    plain["python"] = {**plain["python"], "words": plain["python"]["words"].tolist()}
    plain["numpy"] = {**plain["numpy"], "keys": plain["numpy"]["keys"].tolist()}
    for seed in range(ROUNDS):
        changed = change_json(json.loads(json.dumps(plain)), random.Random(seed))
        attempt(lambda changed=changed: restore_rng(_with_tensors(changed)))


def _with_tensors(value: Any) -> Any:
    """Lists of numbers are tensors again."""
    if isinstance(value, dict):
        return {key: _with_tensors(part) for key, part in value.items()}
    if isinstance(value, list) and len(value) > 100 and all(type(n) is int and abs(n) < 2**62 for n in value):
        return torch.tensor(value, dtype=torch.uint8 if all(0 <= n < 256 for n in value) else torch.int64)
    return value


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(NASTY),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text() | st.sampled_from(["$", "key"]), inner),
    max_leaves=20,
)
tagged = st.fixed_dictionaries(
    {"$": st.sampled_from(["tensor", "float", "numpy", "bytes", "dtype", "tuple", "set", "deque", "dict", "counter"])},
    optional=dict.fromkeys(("key", "text", "array", "base64", "name", "items", "pairs", "maxlen"), json_values),
)


@given(json_values | tagged | st.lists(tagged))
def test_any_json_is_put_together_or_refused(value: Any) -> None:
    keys = attempt(lambda: tensor_keys(value)) or []
    attempt(lambda: put_together(value, {key: torch.zeros(2) for key in keys}))


entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "I64", "X"]) | json_values,
        "shape": st.lists(st.integers(0, 3), max_size=3) | json_values,
        "chunks": json_values
        | st.lists(
            st.fixed_dictionaries(
                {
                    "offsets": st.lists(st.integers(-1, 3), max_size=3) | json_values,
                    "sizes": st.lists(st.integers(-1, 3), max_size=3) | json_values,
                    "file": st.just("rank_00000.safetensors") | json_values,
                    "name": st.text() | json_values,
                }
            ),
            max_size=4,
        ),
    }
)


@given(st.dictionaries(st.text(), entries | json_values, max_size=3) | json_values)
def test_any_index_is_parsed_or_refused(raw: Any) -> None:
    attempt(lambda: parse_index(raw))


boxes = st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 4), st.integers(0, 4))


@given(st.lists(boxes, max_size=6), st.integers(0, 4), st.integers(0, 4))
def test_pieces_are_taken_exactly_if_they_hold_every_element_once(
    pieces: list[tuple[int, int, int, int]], height: int, width: int
) -> None:
    counts = torch.zeros(8, 8, dtype=torch.int64)
    for row, column, rows, columns in pieces:
        counts[row : row + rows, column : column + columns] += 1
    whole = torch.zeros_like(counts)
    whole[:height, :width] = 1
    # Also the empty ones must lie in the tensor, which counting does not see.
    inside = all(row + rows <= height and column + columns <= width for row, column, rows, columns in pieces)
    chunks = [{"offsets": [r, c], "sizes": [h, w], "file": "f", "name": "n"} for r, c, h, w in pieces]
    raw = {"t": {"dtype": "F32", "shape": [height, width], "chunks": chunks}}
    assert (attempt(lambda: parse_index(raw)) is not None) == (inside and torch.equal(counts, whole))
