"""`run.save`: each kind of value in the format that fits it, inside the artifacts folder, whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from keepstep.artifacts import write_artifact
from keepstep.errors import ConfigError


def test_text_and_bytes(tmp_path: Path) -> None:
    assert write_artifact(tmp_path, "a.txt", "grüße").read_text() == "grüße"
    assert write_artifact(tmp_path, "b.bin", b"\x00\xff").read_bytes() == b"\x00\xff"
    assert write_artifact(tmp_path, "c.bin", bytearray(b"\x01")).read_bytes() == b"\x01"


@pytest.mark.parametrize("value", [{"a": [1, 2.5, None]}, [], {}, 3, True, None])
def test_json_values(tmp_path: Path, value: Any) -> None:
    assert json.loads(write_artifact(tmp_path, "v.json", value).read_text()) == value


def test_tensors(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3).T)
    found = load_file(write_artifact(tmp_path, "w.safetensors", weight))
    assert torch.equal(found["tensor"], weight)


def test_a_state_dict_with_tied_weights(tmp_path: Path) -> None:
    weight = torch.ones(2)
    found = load_file(write_artifact(tmp_path, "s.safetensors", {"a": weight, "b": weight, 3: torch.zeros(1)}))
    assert found.keys() == {"a", "b", "3"} and torch.equal(found["b"], weight)


def test_a_figure_gets_a_path_of_its_kind(tmp_path: Path) -> None:
    class Figure:
        def savefig(self, path: Path) -> None:
            assert path.suffix == ".png", "matplotlib chooses the format by it"
            path.write_bytes(b"png")

    assert write_artifact(tmp_path, "loss.png", Figure()).read_bytes() == b"png"


def test_a_path_is_copied(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(b"content")
    assert write_artifact(tmp_path / "artifacts", "copy", tmp_path / "source").read_bytes() == b"content"


def test_folders_in_the_name_are_made(tmp_path: Path) -> None:
    assert write_artifact(tmp_path / "artifacts", "plots/epoch_1/loss.txt", "x").read_text() == "x"


@pytest.mark.parametrize("name", ["../escape", "/etc/passwd", "a/../../b", "", ".", ".."])
def test_names_that_leave_the_folder_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="the name must stay inside the run's artifacts folder"):
        write_artifact(tmp_path / "artifacts", name, "x")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", [object(), {"a": object()}, np.ones(2), {"t": torch.ones(1), "n": 1}, 1j])
def test_what_has_no_format_is_refused_with_what_has(tmp_path: Path, value: Any) -> None:
    with pytest.raises(ConfigError) as error:
        write_artifact(tmp_path, "x", value)
    assert f"run.save('x', ...) got a {type(value).__name__}" in str(error.value)
    assert "it takes text, bytes, JSON values, tensors" in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    class Broken:
        def savefig(self, path: Path) -> None:
            path.write_text("half")
            raise RuntimeError("no fonts")

    write_artifact(tmp_path, "loss.png", "old")
    with pytest.raises(RuntimeError, match="no fonts"):
        write_artifact(tmp_path, "loss.png", Broken())
    assert (tmp_path / "loss.png").read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["loss.png"]


def test_the_same_name_again_replaces(tmp_path: Path) -> None:
    write_artifact(tmp_path, "a", "1")
    assert write_artifact(tmp_path, "a", "2").read_text() == "2"
