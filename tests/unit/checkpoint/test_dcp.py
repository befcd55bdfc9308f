"""DCP without its pickles: tensors of every kind are written, indexed and read back, and damage is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from keepstep.checkpoint.dcp import INDEX, Reader, Snapshot, rank_file, write
from keepstep.checkpoint.files import DTYPES
from keepstep.checkpoint.store import FileRecord, record
from keepstep.checkpoint.tree import Tensors
from keepstep.errors import CheckpointError


def save(folder: Path, tensors: Tensors, rank_state: str = "{}") -> dict[str, FileRecord]:
    snapshot = Snapshot(0, 1)
    snapshot.take(tensors)
    records: dict[str, FileRecord] = {}
    write(folder, snapshot, 0, rank_state, None, records.update)
    return records


def read(folder: Path) -> Tensors:
    reader = Reader(folder)
    targets = {}
    for key in json.loads((folder / INDEX).read_text()):
        shape, dtype = reader.shape_and_dtype(key)
        targets[key] = torch.empty(shape, dtype=dtype)
    reader.load(targets)
    return targets


def change_index(folder: Path, key: str, **fields: Any) -> None:
    index = json.loads((folder / INDEX).read_text())
    index[key]["chunks"][0].update(fields)
    (folder / INDEX).write_text(json.dumps(index))


TENSORS: Tensors = {
    "model/weight": torch.arange(6.0).reshape(2, 3),
    "model/scalar": torch.tensor(2.5, dtype=torch.float64),
    "model/empty": torch.empty(0, 4),
    "optimizer/state/é @1,2": torch.tensor([1, 2], dtype=torch.int64),
}


def test_tensors_come_back(tmp_path: Path) -> None:
    save(tmp_path, TENSORS)
    found = read(tmp_path)
    assert found.keys() == TENSORS.keys()
    for key, tensor in TENSORS.items():
        assert torch.equal(found[key], tensor) and found[key].dtype == tensor.dtype


@pytest.mark.parametrize("name", DTYPES)
def test_every_type_comes_back(tmp_path: Path, name: str) -> None:
    tensor = (torch.arange(16, dtype=torch.uint8) % 2).view(DTYPES[name])
    save(tmp_path, {"t": tensor, "scalar": tensor[0]})
    found = read(tmp_path)
    assert found["t"].dtype == found["scalar"].dtype == DTYPES[name]
    assert found["t"].view(torch.uint8).tolist() == tensor.view(torch.uint8).tolist()


@settings(max_examples=25)
@given(
    st.dictionaries(st.text(min_size=1, max_size=6), st.lists(st.integers(0, 3), max_size=3), min_size=1, max_size=5)
)
def test_any_names_and_shapes_come_back(tmp_path_factory: pytest.TempPathFactory, shapes: dict[str, list[int]]) -> None:
    folder = tmp_path_factory.mktemp("dcp")
    tensors = {f"model/{name}": torch.rand(shape) for name, shape in shapes.items()}
    save(folder, tensors)
    found = read(folder)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in tensors.items())


def test_strides_and_shared_memory_do_not_matter(tmp_path: Path) -> None:
    weight = torch.arange(12.0).reshape(3, 4)
    save(tmp_path, {"t": weight.T, "second": weight[:, ::2], "tied": weight, "again": weight})
    found = read(tmp_path)
    assert torch.equal(found["t"], weight.T) and torch.equal(found["second"], weight[:, ::2])
    assert torch.equal(found["tied"], weight) and torch.equal(found["again"], weight)


def test_training_may_go_on_while_a_snapshot_is_written(tmp_path: Path) -> None:
    weight = torch.zeros(3)
    snapshot = Snapshot(0, 1)
    snapshot.take({"w": weight})
    weight.fill_(7.0)
    write(tmp_path, snapshot, 0, "{}", None, lambda records: None)
    assert read(tmp_path)["w"].tolist() == [0.0, 0.0, 0.0]


def test_host_memory_is_used_again_unless_a_tensor_changed_its_shape() -> None:
    snapshot = Snapshot(0, 1)
    snapshot.take({"a": torch.zeros(3), "b": torch.zeros(2)})
    first = {item.index.fqn: snapshot.tensor(item.index) for item in snapshot.plan.items}
    snapshot.take({"a": torch.ones(3), "b": torch.ones(4)})
    second = {item.index.fqn: snapshot.tensor(item.index) for item in snapshot.plan.items}
    assert second["a"] is first["a"] and second["a"].tolist() == [1.0, 1.0, 1.0]
    assert second["b"] is not first["b"] and second["b"].tolist() == [1.0] * 4


def test_the_records_are_those_of_the_files(tmp_path: Path) -> None:
    records = save(tmp_path, TENSORS)
    assert records == {rank_file(0): record(tmp_path / rank_file(0))}


def test_there_is_no_pickle_in_it(tmp_path: Path) -> None:
    save(tmp_path, TENSORS)
    assert sorted(path.name for path in tmp_path.iterdir()) == [rank_file(0), INDEX]
    json.loads((tmp_path / INDEX).read_text())
    assert set(load_file(tmp_path / rank_file(0))) == set(TENSORS)


def test_a_workers_own_state_comes_back(tmp_path: Path) -> None:
    save(tmp_path, TENSORS, rank_state='{"rng": "é"}')
    assert Reader(tmp_path).rank_state(0) == {"rng": "é"}
    assert Reader(tmp_path).rank_state(1) is None


def test_a_part_is_read_without_the_rest(tmp_path: Path) -> None:
    save(tmp_path, TENSORS)
    targets = {"model/weight": torch.empty(2, 3)}
    Reader(tmp_path).load(targets)
    assert torch.equal(targets["model/weight"], TENSORS["model/weight"])


def test_a_tensor_is_filled_where_it_is(tmp_path: Path) -> None:
    save(tmp_path, TENSORS)
    parameter = torch.nn.Parameter(torch.zeros(3, 2).T)  # with strides of its own
    address = parameter.data_ptr()
    Reader(tmp_path).load({"model/weight": parameter})
    assert parameter.data_ptr() == address and parameter.stride() == (1, 2)
    assert torch.equal(parameter, TENSORS["model/weight"])


def test_an_error_in_the_commit_is_not_lost(tmp_path: Path) -> None:
    snapshot = Snapshot(0, 1)
    snapshot.take(TENSORS)

    def full(records: dict[str, FileRecord]) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises((OSError, CheckpointError), match="No space left on device"):
        write(tmp_path, snapshot, 0, "{}", None, full)


def test_a_type_that_cannot_be_held_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot hold a tensor of type torch.complex64"):
        save(tmp_path, {"t": torch.ones(2, dtype=torch.complex64)})


def test_a_tensor_that_is_not_there_is_named(tmp_path: Path) -> None:
    save(tmp_path, TENSORS)
    with pytest.raises(CheckpointError, match="refers to a tensor 'model/bias' that it does not hold"):
        Reader(tmp_path).shape_and_dtype("model/bias")


def test_a_target_of_another_shape_is_refused_and_left_alone(tmp_path: Path) -> None:
    save(tmp_path, TENSORS)
    target = torch.zeros(4, 4)
    with pytest.raises(CheckpointError, match=r"has 'model/weight' with shape \(2, 3\); \(4, 4\) was expected"):
        Reader(tmp_path).load({"model/weight": target})
    assert target.sum() == 0


@pytest.mark.parametrize("file", ["../other.safetensors", "/etc/passwd", "sub/rank_00000.safetensors"])
def test_an_index_cannot_reach_outside(tmp_path: Path, file: str) -> None:
    save(tmp_path, TENSORS)
    change_index(tmp_path, "model/weight", file=file)
    with pytest.raises(CheckpointError, match="names a file outside the checkpoint"):
        Reader(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"a": {}}', '{"a": {"chunks": [], "dtype": "X", "shape": [1]}}'])
def test_an_index_that_cannot_be_read_is_named(tmp_path: Path, text: str) -> None:
    save(tmp_path, TENSORS)
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(CheckpointError, match=f"{tmp_path.name}/{INDEX} cannot be read"):
        Reader(tmp_path)


def test_a_missing_index_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"{tmp_path.name}/{INDEX} is missing"):
        Reader(tmp_path)


def test_a_piece_of_another_shape_than_the_index_says_is_refused(tmp_path: Path) -> None:
    save(tmp_path, TENSORS)
    change_index(tmp_path, "model/weight", name="model/scalar")
    with pytest.raises(CheckpointError, match=r"tensor 'model/scalar' has shape \[\]; \[2, 3\] was expected"):
        Reader(tmp_path).load({"model/weight": torch.empty(2, 3)})


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    save(tmp_path, TENSORS)
    (tmp_path / rank_file(0)).unlink()
    with pytest.raises(CheckpointError, match=f"{rank_file(0)} is missing"):
        Reader(tmp_path).load({"model/weight": torch.empty(2, 3)})
