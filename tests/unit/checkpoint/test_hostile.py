"""A checkpoint from elsewhere: every lie in it is found before it costs anything, and named in one line."""

from __future__ import annotations

import json
import os
import pickle
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from keepstep.checkpoint import untrusted
from keepstep.checkpoint.contents import check_contents
from keepstep.checkpoint.dcp import INDEX, rank_file
from keepstep.checkpoint.export import export
from keepstep.checkpoint.saver import STATE
from keepstep.checkpoint.store import MANIFEST, Store
from keepstep.checkpointer import _check_run
from keepstep.checkpoints import print_checkpoints
from keepstep.collective import Collective
from keepstep.errors import CheckpointError
from keepstep.folder import RunFolder
from keepstep.seeding import capture_rng, restore_rng
from keepstep.show import print_run
from keepstep.state import Loaded, load, newest_good
from unit.checkpoint.forgery import STEP, forge, make_checkpoint, read_everything, seal
from unit.test_state import make_state, save

WEIGHT = "model/weight"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return make_checkpoint(tmp_path)


def refused(store: Store, complaint: str) -> None:
    """Named in one line, passed over by a run, and not exported."""
    with pytest.raises(CheckpointError, match=complaint) as error:
        read_everything(store)
    assert "\n" not in str(error.value) and str(error.value).startswith(store.path(STEP).name)
    step, passed_over = newest_good(store, Collective(1, torch.device("cpu")), 0, 1)
    assert step is None and passed_over == [str(error.value)]
    with pytest.raises(CheckpointError):
        check_contents(store, STEP)


def change_entry(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda index: index[WEIGHT].update(fields)


def chunk(offsets: list[Any], sizes: list[Any], **fields: Any) -> dict[str, Any]:
    return {"offsets": offsets, "sizes": sizes, "file": rank_file(0), "name": WEIGHT, **fields}


ROWS = [chunk([0, 0], [1, 3]), chunk([1, 0], [1, 3])]


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"chunks": []}, "have 0 elements; its shape .* has 6"),
        ({"chunks": ROWS[:1]}, "have 3 elements; its shape .* has 6"),
        ({"chunks": [ROWS[0], ROWS[0]]}, "its pieces overlap"),
        ({"chunks": [chunk([0, 0], [2, 2]), chunk([0, 1], [2, 1])]}, "its pieces overlap"),
        ({"chunks": [*ROWS, ROWS[1]]}, "have 9 elements"),
        ({"chunks": [chunk([0, 0], [3, 3])]}, "does not lie in the shape"),
        ({"chunks": [chunk([1, 0], [2, 3])]}, "does not lie in the shape"),
        ({"chunks": [chunk([0], [6])]}, "does not lie in the shape"),
        ({"chunks": [chunk([-1, 0], [2, 3])]}, "a size or offset is -1"),
        ({"chunks": [chunk([0, 0], [-2, -3])]}, "a size or offset is -2"),
        ({"chunks": [chunk([0, 0], [True, 6])]}, "a size or offset is True"),
        ({"chunks": [chunk([0, 0], [2.0, 3])]}, "a size or offset is 2.0"),
        ({"chunks": [chunk([0, 0], [10**30, 3])]}, "a size or offset is 1000"),
        ({"chunks": {}}, "its chunks are no list"),
        ({"chunks": [3]}, "malformed"),
        ({"chunks": [chunk([0, 0], [2, 3], name=[])]}, "a piece's name is"),
        ({"chunks": [chunk([0, 0], [2, 3], name="absent")]}, "cannot be read: .*absent"),
        ({"chunks": [chunk([0, 0], [2, 3], file="manifest.json")]}, "the manifest does not know"),
        ({"chunks": [chunk([0, 0], [2, 3], file=STATE)]}, "cannot be read"),
        ({"dtype": "F65"}, "its type is 'F65'"),
        ({"dtype": []}, "malformed"),
        ({"dtype": "I32"}, "has type F32; I32 was expected"),
        ({"shape": [6]}, "does not lie in the shape"),
        ({"shape": "ab"}, "is no list"),
        ({"shape": [1] * 65}, "is no list of at most 64"),
        ({"shape": [2**40, 2**40]}, "is of no tensor"),
    ],
)
def test_an_index_that_does_not_add_up_is_refused(store: Store, fields: dict[str, Any], complaint: str) -> None:
    forge(store.path(STEP), INDEX, change_entry(**fields))
    with pytest.raises(CheckpointError, match=complaint):
        read_everything(store)


def test_pieces_may_lie_in_any_order_and_shape(store: Store, tmp_path: Path) -> None:
    """What is refused is not what another number of workers writes."""
    from safetensors.torch import load_file, save_file

    path = store.path(STEP) / rank_file(0)
    tensors = load_file(path)
    weight = tensors.pop(WEIGHT)
    cuts = {"a": (0, 0, 1, 2), "b": (0, 2, 2, 1), "c": (1, 0, 1, 2)}
    for name, (row, column, height, width) in cuts.items():
        tensors[name] = weight[row : row + height, column : column + width].contiguous()
    save_file(tensors, path, {"state": "null"})
    chunks = [chunk([row, column], [h, w], name=name) for name, (row, column, h, w) in cuts.items()]
    empty = chunk([2, 0], [0, 3], name="nowhere")
    forge(store.path(STEP), INDEX, change_entry(chunks=[chunks[1], empty, chunks[2], chunks[0]]))
    state, _, _ = read_everything(store)
    assert torch.equal(state["model"]["weight"], weight)


def test_a_shape_that_no_file_backs_is_refused_before_memory_is_made(store: Store) -> None:
    sizes = [2**20, 2**10]
    forge(store.path(STEP), INDEX, change_entry(shape=sizes, chunks=[chunk([0, 0], sizes)]))
    refused(store, rf"says that {rank_file(0)} holds 42949\d+ bytes of tensors; the file has \d+")


def test_one_piece_cannot_be_many_tensors(store: Store) -> None:
    """A small file would otherwise fill the memory with copies."""

    def copy(index: dict[str, Any]) -> None:
        index.update({f"copy {number}": index[WEIGHT] for number in range(10_000)})

    forge(store.path(STEP), INDEX, copy)
    refused(store, "bytes of tensors; the file has")


@pytest.mark.parametrize("name", [STATE, INDEX, MANIFEST, rank_file(0)])
@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "absent"])
@pytest.mark.timeout(60)
def test_only_regular_files_are_read(store: Store, tmp_path: Path, name: str, kind: str) -> None:
    """A link could read any file, and a pipe would be waited for for ever."""
    path = store.path(STEP) / name
    elsewhere = path.rename(tmp_path / "elsewhere")
    {
        "link": lambda: path.symlink_to(elsewhere),
        "pipe": lambda: os.mkfifo(path),
        "folder": path.mkdir,
        "absent": lambda: None,
    }[kind]()
    refused(store, f"has no {name}|{name} is missing" if kind == "absent" else f"{name} is not a regular file")


@pytest.mark.parametrize("name", [STATE, INDEX, MANIFEST])
def test_a_file_of_another_size_than_declared_is_not_read(
    store: Store, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.truncate(store.path(STEP) / name, 1 << 42)  # 4 TiB that take no room on the disk
    if name != MANIFEST:
        monkeypatch.setattr(Store, "check", lambda *_: None)
    refused(store, f"{name} has {1 << 42} bytes")


def test_declared_or_not_json_has_a_limit(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(untrusted, "JSON_LIMIT", (store.path(STEP) / INDEX).stat().st_size - 1)
    refused(store, f"{INDEX} has .* bytes; at most")


@pytest.mark.parametrize(
    ("state", "complaint"),
    [
        ([], "no JSON object"),
        ("text", "no JSON object"),
        ({"model": {"$": "tensor", "key": "absent"}}, "refers to a tensor 'absent' that it does not hold"),
        ({"model": {"$": "tensor"}}, "refers to a tensor None"),
        ({"model": {"$": "tensor", "key": ["a"]}}, "refers to a tensor"),
        ({"x": {"$": "tuple", "items": 3}}, "holds a 'tuple' that cannot be read"),
        ({"x": {"$": "tuple", "items": {"a": 1}}}, "holds a 'tuple' that cannot be read"),
        ({"x": {"$": "set", "items": [[]]}}, "holds a 'set' that cannot be read"),
        ({"x": {"$": "deque", "items": [], "maxlen": -1}}, "holds a 'deque' that cannot be read"),
        ({"x": {"$": "dict", "pairs": [[1, 2, 3]]}}, "holds a 'dict' that cannot be read"),
        ({"x": {"$": "dict", "pairs": [[[], 2]]}}, "holds a 'dict' that cannot be read"),
        ({"x": {"$": "float", "text": "one"}}, "holds a 'float' that cannot be read"),
        ({"x": {"$": "bytes", "base64": "?"}}, "holds a 'bytes' that cannot be read"),
        ({"x": {"$": "numpy", "array": 3}}, "holds a 'numpy' that cannot be read"),
        ({"x": {"$": "dtype", "name": "nn"}}, "names a type torch.nn"),
        ({"x": {"$": "dtype", "name": []}}, "holds a 'dtype' that cannot be read"),
        ({"x": {"$": "os.system"}}, "holds a 'os.system', which this version"),
        ({"x": {"$": []}}, r"holds a \[\], which this version"),
        ({"x": {"$": None}}, "holds a None, which this version"),
    ],
)
def test_a_state_that_cannot_be_put_together_is_refused(store: Store, state: Any, complaint: str) -> None:
    forge(store.path(STEP), STATE, lambda _: state)
    refused(store, complaint)


@pytest.mark.parametrize("opening", ['{"a":', "[", '{"$": "tuple", "items": [', '{"$": "dict", "pairs": [[0, '])
@pytest.mark.parametrize("depth", [90, 400, 100_000])
def test_depth_is_limited(store: Store, opening: str, depth: int) -> None:
    closing = "".join({"{": "}", "[": "]"}[letter] for letter in reversed(opening) if letter in "{[")
    (store.path(STEP) / STATE).write_text('{"x": ' + opening * depth + "0" + closing * depth + "}")
    seal(store.path(STEP))
    if depth == 90:
        read_everything(store)
    else:
        refused(store, "nested too deeply|cannot be read")


def test_asking_for_a_type_imports_nothing(store: Store) -> None:
    """Some of torch's attributes are imported when they are first asked for."""
    before = set(sys.modules)
    for name in ("onnx", "_dynamo", "_inductor", "export"):
        forge(store.path(STEP), STATE, lambda _, name=name: {"x": {"$": "dtype", "name": name}})
        refused(store, f"names a type torch.{name}")
    assert {module for module in set(sys.modules) - before if module.startswith("torch.")} == set()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("step", "3"),
        ("step", 4),
        ("step", -1),
        ("step", 10**400),
        ("epoch", 1.5),
        ("world_size", 0),
        ("world_size", 10**15),
        ("strategy", ["ddp"]),
        ("strategy", "\x1b[2J"),
        ("created", 1e300),
        ("created", None),
        ("torch", 2),
        ("format", 2),
        ("files", []),
        ("files", {}),
        ("files", {STATE: {"bytes": "many", "xxh3": ""}}),
        ("files", {STATE: {"bytes": 3, "xxh3": "", "more": 1}}),
        ("metrics", {"loss": [1]}),
        ("metrics", {"loss": 10**400}),
        ("metrics", {"loss": "1_0"}),
        ("unknown", 1),
    ],
)
def test_a_manifest_is_believed_field_by_field(store: Store, field: str, value: Any) -> None:
    forge(store.path(STEP), MANIFEST, lambda manifest: manifest.update({field: value}))
    with pytest.raises(CheckpointError) as error:
        read_everything(store)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("best", ["[]", "{", '{"step": 1e999}', "[" * 100_000, '{"step": {}}', "\0"])
def test_a_strange_best_is_none(store: Store, best: str) -> None:
    (store.root / "best.json").write_text(best)
    assert store.best() is None


def test_a_generators_position_cannot_lead_out_of_its_words() -> None:
    """NumPy reads wherever it is told to (10**6 is a segmentation fault), torch up to 623 words too far."""
    for position in (10**6, -5, 625):
        state = capture_rng()
        state["numpy"]["position"] = position
        with pytest.raises(CheckpointError, match="random number generators cannot be put back"):
            restore_rng(state)
    state = capture_rng()
    for left, position in ((624, 624), (624, 2), (3, 623), (5, 10**6)):
        state["torch"][8:24] = torch.tensor(list(struct.pack("=iiQ", left, 1, position)), dtype=torch.uint8)
        with pytest.raises(CheckpointError, match=f"torch's position is {position}, with {left} words left"):
            restore_rng(state)


def test_a_generator_can_be_put_back_wherever_it_stands() -> None:
    for draws in (0, 1, 622, 623, 624, 625, 1300):
        torch.manual_seed(1)
        np.random.seed(1)
        torch.rand(draws)
        np.random.rand(draws)
        state = capture_rng()
        expected = torch.rand(700), np.random.rand(700)
        restore_rng(state)
        assert torch.equal(torch.rand(700), expected[0]) and (np.random.rand(700) == expected[1]).all()


RUN = {
    "step": STEP,
    "epoch": 1,
    "epoch_under_way": True,
    "active_loader": "loader",
    "metrics": {"loss": 0.5},
    "metrics_bytes": 17,
}


@pytest.mark.parametrize(
    ("run", "own"),
    [
        (None, None),
        ([], None),
        ({}, None),
        *(({**RUN, name: "x" if name != "active_loader" else 3}, None) for name in RUN),
        ({**RUN, "step": STEP + 1}, None),
        ({**RUN, "epoch": -1}, None),
        ({**RUN, "metrics_bytes": -1}, None),
        (RUN, []),
        (RUN, {"rng": {}}),
    ],
)
def test_a_run_goes_on_only_by_what_it_understands(run: Any, own: Any) -> None:
    _check_run(Loaded(STEP, {"run": RUN}, {"rng": {}, "epoch_rng": None}, 1))
    with pytest.raises(CheckpointError, match="it was not written by keepstep"):
        _check_run(Loaded(STEP, {"run": run}, own, 1))


def test_what_could_not_be_read_back_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keepstep.checkpoint.saver.JSON_LIMIT", 100)
    with pytest.raises(CheckpointError, match="bytes of values that are no tensors; at most 100 can be read back"):
        make_checkpoint(tmp_path)


def test_weights_cannot_be_left_as_they_were_made(tmp_path: Path) -> None:
    """A model's entry that names another tensor would leave the model's own unloaded."""
    store = Store(tmp_path, keep=9)
    save(store, STEP, make_state())
    forge(store.path(STEP), STATE, lambda state: state["model"].update(weight=state["model"]["bias"]))
    with pytest.raises(CheckpointError, match="does not say where it holds 'model/weight'"):
        load(store, STEP, make_state(), 0)


def test_nothing_is_unpickled(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saving may pickle (DCP plans among workers do); reading never does."""

    def fail(*_: Any, **__: Any) -> Any:
        raise AssertionError("something was unpickled")

    class Unpickler:
        __init__ = fail

    for name in ("load", "loads", "_load", "_loads"):
        monkeypatch.setattr(pickle, name, fail)
    for name in ("Unpickler", "_Unpickler"):
        monkeypatch.setattr(pickle, name, Unpickler)
    monkeypatch.setattr(torch, "load", fail)
    monkeypatch.setattr(torch.serialization, "load", fail)
    read_everything(store)
    export(store, STEP, tmp_path / "w.safetensors")
    folder = RunFolder(tmp_path / "runs", "elsewhere")
    folder.create()
    store.root.rename(folder.checkpoints)
    assert print_run(tmp_path / "runs", "elsewhere") == 0
    assert print_checkpoints(tmp_path / "runs", "elsewhere", verify=True) == 0


LIMITED = """
import resource, sys
from pathlib import Path
import torch
sys.path.insert(0, {tests!r})
from keepstep.checkpoint.store import Store
from keepstep.errors import CheckpointError
from unit.checkpoint.forgery import read_everything
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 28), used + (1 << 28)))
try:
    read_everything(Store(Path(sys.argv[1]), keep=9))
except CheckpointError as error:
    print(error)
"""


def test_a_lie_about_size_costs_no_memory(store: Store) -> None:
    """In a process that may take no more than 256 MiB: a shape of 4 GiB and a state of 8 TiB are refused unread."""
    command = [sys.executable, "-c", LIMITED.format(tests=str(Path(__file__).parents[2])), str(store.root)]

    def run() -> str:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run() == ""
    original = (store.path(STEP) / INDEX).read_text()
    sizes = [2**20, 2**10]
    forge(store.path(STEP), INDEX, change_entry(shape=sizes, chunks=[chunk([0, 0], sizes)]))
    assert "bytes of tensors; the file has" in run()
    (store.path(STEP) / INDEX).write_text(original)
    seal(store.path(STEP))
    os.truncate(store.path(STEP) / STATE, 1 << 43)
    manifest = json.loads((store.path(STEP) / MANIFEST).read_text())
    assert manifest["files"][STATE]["bytes"] < 10_000
    assert f"{STATE} has {1 << 43} bytes" in run()
