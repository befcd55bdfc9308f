"""A checkpoint becomes plain weights that `load_state_dict` takes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from keepstep.checkpoint.export import DTYPES, choose_step, export, parse_size
from keepstep.checkpoint.saver import STATE, Saver
from keepstep.checkpoint.store import Manifest, Store
from keepstep.errors import CheckpointError, ConfigError

INDEX = "model.safetensors.index.json"


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
    assert export(store, 4, output).tensors == len(model.state_dict())
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
    with pytest.raises(CheckpointError, match=r"the checkpoint has no 'teacher'; it has model, model_2"):
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
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("keepstep.checkpoint.export.stream_safetensors", fail)
    with pytest.raises(CheckpointError, match=r"w.safetensors cannot be written \(No space left on device\)"):
        export(store, 1, output)
    assert output.read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "w.safetensors"]


def sharded(folder: Path) -> dict[str, torch.Tensor]:
    """What a Hugging Face reader finds: every tensor in the file that the index names, and in no other."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = {name: load_file(folder / name) for name in set(index["weight_map"].values())}
    tensors = {name: files[file][name] for name, file in index["weight_map"].items()}
    assert sum(map(len, files.values())) == len(tensors)
    assert index["metadata"] == {"total_size": sum(tensor.nbytes for tensor in tensors.values())}
    return tensors


LAYERS = {f"layers.{n}.weight": torch.full((10,), float(n)) for n in range(5)}


def test_shards_are_in_the_hugging_face_layout(store: Store, tmp_path: Path) -> None:
    save(store, 1, model=LAYERS)
    exported = export(store, 1, tmp_path / "out", shard_bytes=100)
    assert exported.files == [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [*exported.files, INDEX]
    found = sharded(tmp_path / "out")
    assert list(found) == list(LAYERS)
    assert all(torch.equal(found[name], tensor) for name, tensor in LAYERS.items())


def test_a_tensor_larger_than_a_shard_has_one_of_its_own(store: Store, tmp_path: Path) -> None:
    save(store, 1, model={"a": torch.ones(1), "large": torch.ones(99), "b": torch.ones(1), "c": torch.ones(1)})
    export(store, 1, tmp_path, shard_bytes=16)
    sizes = {name: set(load_file(tmp_path / name)) for name in sorted(set(index_of(tmp_path).values()))}
    assert list(sizes.values()) == [{"a"}, {"large"}, {"b", "c"}]


def index_of(folder: Path) -> dict[str, str]:
    weight_map: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
    return weight_map


def test_what_fits_into_one_shard_needs_no_index(store: Store, tmp_path: Path) -> None:
    save(store, 1, model=LAYERS)
    out = tmp_path / "out"
    export(store, 1, out, shard_bytes=100)
    (out / "config.json").write_text("{}")
    assert export(store, 1, out, shard_bytes=10**9).files == ["model.safetensors"]
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors"]
    export(store, 1, out, shard_bytes=160)  # and back: a reader would take the whole file before the index
    assert sorted(path.name for path in out.iterdir()) == [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        INDEX,
    ]


def test_shards_of_two_exports_are_never_under_one_index(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(store, 1, model=LAYERS)
    save(store, 2, model={name: tensor + 100 for name, tensor in LAYERS.items()})
    export(store, 1, tmp_path / "out", shard_bytes=100)
    real_replace, calls = Path.replace, []

    def die_at(number: int) -> None:
        def replace(self: Path, target: Path) -> Path:
            calls.append(target)
            if len(calls) == number:
                raise OSError(5, "Input/output error")
            return real_replace(self, target)

        calls.clear()
        monkeypatch.setattr(Path, "replace", replace)
        with pytest.raises(CheckpointError, match="cannot be written"):
            export(store, 2, tmp_path / "out", shard_bytes=100)
        monkeypatch.undo()

    for number in (1, 2, 3, 4):
        die_at(number)
        assert not (tmp_path / "out" / INDEX).exists()
        assert [path.name for path in (tmp_path / "out").iterdir() if path.name.startswith(".")] == []
    export(store, 2, tmp_path / "out", shard_bytes=100)
    assert sharded(tmp_path / "out")["layers.4.weight"].tolist() == [104.0] * 10


def test_an_export_that_fails_while_it_writes_leaves_the_old_shards(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(store, 1, model=LAYERS)
    export(store, 1, tmp_path / "out", shard_bytes=100)
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        export(store, 1, tmp_path / "out", shard_bytes=40)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


@pytest.mark.parametrize(("name", "dtype"), DTYPES.items())
def test_floating_tensors_are_cast_and_others_are_not(
    store: Store, tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    state = {"half": torch.tensor([1.5], dtype=torch.float16), "w": torch.rand(3), "n": torch.tensor(3), "b": BOOLS}
    save(store, 1, model=state)
    exported = export(store, 1, tmp_path / "w.safetensors", dtype=name)
    found = load_file(tmp_path / "w.safetensors")
    assert {key: tensor.dtype for key, tensor in found.items()} == {
        "half": dtype,
        "w": dtype,
        "n": torch.int64,
        "b": torch.bool,
    }
    assert torch.equal(found["w"], state["w"].to(dtype)) and exported.notes == []


BOOLS = torch.tensor([True, False])


def test_a_value_too_large_for_the_type_is_told(store: Store, tmp_path: Path) -> None:
    save(store, 1, model={"mask": torch.tensor([-1e9, 0.0]), "w": torch.ones(2), "inf": torch.tensor(float("inf"))})
    exported = export(store, 1, tmp_path / "w.safetensors", dtype="fp16")
    assert exported.notes == ["became infinite in fp16, for it was too large: mask"]
    assert export(store, 1, tmp_path / "w.safetensors", dtype="bf16").notes == []


def test_a_prefix_is_taken_off(store: Store, tmp_path: Path) -> None:
    save(store, 1, model={"model.w": torch.zeros(2), "model.model.w": torch.ones(2), "head": torch.ones(1)})
    export(store, 1, tmp_path / "w.safetensors", strip_prefix="model.")
    assert set(load_file(tmp_path / "w.safetensors")) == {"w", "model.w", "head"}


@pytest.mark.parametrize(
    ("names", "complaint"),
    [
        (["w"], "no tensor's name begins with 'model.'; the first is 'w'"),
        ([], "no tensor's name begins with 'model.'"),
        (["w", "model.w"], "without 'model.', 'w' and 'model.w' are both called 'w'"),
        (["model."], "nothing is left of the name 'model.'"),
    ],
)
def test_a_prefix_that_cannot_be_taken_off_is_refused(
    store: Store, tmp_path: Path, names: list[str], complaint: str
) -> None:
    save(store, 1, model={name: torch.zeros(1) for name in names})
    with pytest.raises(CheckpointError, match=complaint):
        export(store, 1, tmp_path / "w.safetensors", strip_prefix="model.")
    assert not (tmp_path / "w.safetensors").exists()


def test_tied_weights_load_strictly(store: Store, tmp_path: Path) -> None:
    def tied() -> nn.Sequential:
        model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
        model[1].weight = model[0].weight
        return model

    model = tied()
    save(store, 1, model=model.state_dict())
    export(store, 1, tmp_path / "w.safetensors")
    export(store, 1, tmp_path / "shards", shard_bytes=60)
    for found in (load_file(tmp_path / "w.safetensors"), sharded(tmp_path / "shards")):
        other = tied()
        other.load_state_dict(found, strict=True)
        assert torch.equal(other[1].weight, model[0].weight) and other[0].weight is other[1].weight


def test_what_is_no_tensor_is_left_out_and_named(store: Store, tmp_path: Path) -> None:
    save(store, 1, model={"w": torch.zeros(2), "_extra_state": {"scale": torch.ones(1), "n": 3}})
    exported = export(store, 1, tmp_path / "w.safetensors")
    assert exported.notes == ["left out, for it is no tensor: _extra_state"]
    assert set(load_file(tmp_path / "w.safetensors")) == {"w"}


def test_every_tensor_begins_where_it_can_be_mapped(store: Store, tmp_path: Path) -> None:
    state = {"b": torch.ones(3, dtype=torch.bool), "h": torch.ones(3, dtype=torch.float16), "d": torch.ones(3)}
    save(store, 1, model={**state, "n": torch.tensor(1)})
    export(store, 1, tmp_path / "w.safetensors")
    data = (tmp_path / "w.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    for name, entry in json.loads(data[8 : 8 + length]).items():
        if name != "__metadata__":
            size = {"BOOL": 1, "F16": 2, "F32": 4, "I64": 8}[entry["dtype"]]
            assert (8 + length + entry["data_offsets"][0]) % size == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [("5GB", 5 * 10**9), ("500MB", 5 * 10**8), ("2GiB", 2 << 30), ("1.5 MiB", 3 << 19), ("1KB", 1000)],
)
def test_sizes(text: str, expected: int) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize("text", ["", "5", "GB", "0GB", "-1GB", "5gb", "5 TB", "1e3MB", "5GB5"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--shard-size is .*; a size is expected, as 5GB"):
        parse_size(text)


def test_the_output_may_not_be_a_folder(store: Store, tmp_path: Path) -> None:
    save(store, 1, model=LAYERS)
    with pytest.raises(CheckpointError, match="cannot be written"):
        export(store, 1, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]


MEASURED = """
import sys
from pathlib import Path
from keepstep.checkpoint.export import export
from keepstep.checkpoint.store import Store

def peak():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) * 1024

root = Path(sys.argv[1])
export(Store(root / "small", keep=1), 1, root / "small.safetensors")  # what imports and buffers take
before = peak()
export(Store(root / "large", keep=1), 1, root / "whole.safetensors", dtype=sys.argv[2])
whole = peak()
export(Store(root / "large", keep=1), 1, root / "shards", dtype=sys.argv[2], shard_bytes=64 << 20)
print(whole - before, peak() - before)
"""


def test_memory_is_that_of_a_few_tensors(tmp_path: Path) -> None:
    """Of a checkpoint of 384 MiB in tensors of 8, whole or in shards, less than 96 MiB are in memory at any time."""
    save(Store(tmp_path / "small", keep=1), 1, model={"w": torch.zeros(2)})
    save(Store(tmp_path / "large", keep=1), 1, model={f"w{n}": torch.full((2 << 20,), float(n)) for n in range(48)})
    command = [sys.executable, "-c", MEASURED, str(tmp_path), "bf16"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert all(int(grown) < 96 << 20 for grown in done.stdout.split()), done.stdout
    found = load_file(tmp_path / "whole.safetensors")
    assert all((found[f"w{n}"] == n).all() for n in range(48))


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
