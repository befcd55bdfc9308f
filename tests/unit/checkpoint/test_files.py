"""The safetensors files that are written here are those that the safetensors package reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from keepstep.checkpoint import files
from keepstep.checkpoint.files import DTYPES, dtype_name, stream_safetensors, write_safetensors
from keepstep.checkpoint.store import digest, record
from keepstep.errors import CheckpointError


def as_bytes(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


@pytest.mark.parametrize("name", DTYPES)
def test_every_type_is_read_back_by_the_safetensors_package(tmp_path: Path, name: str) -> None:
    dtype = DTYPES[name]
    random_bytes = torch.arange(64, dtype=torch.uint8) % (2 if dtype == torch.bool else 251)
    tensor = random_bytes.view(dtype).reshape(2, -1)
    write_safetensors(tmp_path / "x.safetensors", {"tensor": tensor}, {})
    found = load_file(tmp_path / "x.safetensors")["tensor"]
    assert found.dtype == dtype and found.shape == tensor.shape
    assert as_bytes(found) == as_bytes(tensor)


shapes = st.lists(st.integers(0, 4), max_size=3)


@given(
    st.dictionaries(st.text(min_size=1, max_size=6), shapes, max_size=5),
    st.dictionaries(st.text(max_size=5), st.text(max_size=20), max_size=3),
)
def test_any_names_shapes_and_metadata_are_read_back(
    tmp_path_factory: pytest.TempPathFactory, named: dict[str, list[int]], metadata: dict[str, str]
) -> None:
    path = tmp_path_factory.mktemp("files") / "x.safetensors"
    tensors = {name: torch.rand(shape) for name, shape in named.items()}
    write_safetensors(path, tensors, metadata)
    found = load_file(path)
    assert found.keys() == tensors.keys()
    assert all(
        torch.equal(found[name], tensor) and found[name].shape == tensor.shape for name, tensor in tensors.items()
    )
    with safe_open(path, framework="pt") as opened:
        assert (opened.metadata() or {}) == metadata


def test_the_record_is_that_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    tensors = {"a": torch.arange(7, dtype=torch.int16), "empty": torch.empty(0, 3), "scalar": torch.tensor(2.5)}
    written = write_safetensors(path, tensors, {"state": "é"})
    assert written == record(path)
    assert written.xxh3 == digest(path)


@pytest.mark.parametrize("name", ["a", "ab", "abc", "abcd", "abcde"])
def test_data_begins_where_the_format_wants_it(tmp_path: Path, name: str) -> None:
    """At a multiple of 8 bytes, so that a reader can map the file."""
    write_safetensors(tmp_path / "x", {name: torch.ones(1)}, {})
    assert int.from_bytes((tmp_path / "x").read_bytes()[:8], "little") % 8 == 0


def test_a_tensor_larger_than_a_chunk_is_written_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_CHUNK", 16)
    path = tmp_path / "x.safetensors"
    tensors = {"a": torch.arange(17), "b": torch.arange(4)}
    assert write_safetensors(path, tensors, {}) == record(path)
    assert all(torch.equal(found, tensors[name]) for name, found in load_file(path).items())


def test_a_disk_that_takes_little_at_a_time_gets_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A raw file may write less than it was given."""
    real_open = Path.open

    class Slow:
        def __init__(self, file: Any) -> None:
            self.file = file

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

        def fileno(self) -> int:
            number: int = self.file.fileno()
            return number

        def write(self, data: Any) -> int:
            count: int = self.file.write(memoryview(data)[:5])
            return count

    path = tmp_path / "x.safetensors"
    monkeypatch.setattr(Path, "open", lambda self, *args, **kwargs: Slow(real_open(self, *args, **kwargs)))
    tensor = torch.arange(10)
    written = write_safetensors(path, {"a": tensor}, {"state": "long enough to be cut"})
    monkeypatch.undo()
    assert written == record(path)
    assert torch.equal(load_file(path)["a"], tensor)


def test_a_type_that_the_format_lacks_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"cannot hold a tensor of type torch.complex64; known: F64, F32"):
        dtype_name(torch.complex64)


def test_names_and_types_are_one_to_one() -> None:
    assert all(dtype_name(dtype) == name for name, dtype in DTYPES.items())


def test_tensors_may_come_one_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    layout = {f"t{n}": (torch.float32, torch.Size([n])) for n in range(4)}
    written = stream_safetensors(path, layout, (torch.full((n,), float(n)) for n in range(4)), {})
    assert written == record(path)
    assert {name: tensor.tolist() for name, tensor in load_file(path).items()} == {f"t{n}": [n] * n for n in range(4)}


def test_tensors_that_were_not_announced_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="not announced"):
        stream_safetensors(tmp_path / "x", {"a": (torch.float32, torch.Size([2]))}, [torch.ones(3)], {})


def test_the_formats_own_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot hold a tensor of the name __metadata__"):
        write_safetensors(tmp_path / "x", {"__metadata__": torch.ones(1)}, {})
