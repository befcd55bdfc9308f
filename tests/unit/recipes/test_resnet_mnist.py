"""The ResNet-18 with torchvision's names, and the idx reader."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from keepstep.errors import DataError

LoadRecipe = Callable[[str, str], ModuleType]


@pytest.fixture
def model(load_recipe: LoadRecipe) -> Any:
    return load_recipe("resnet_mnist", "model")


@pytest.fixture
def data(load_recipe: LoadRecipe) -> Any:
    return load_recipe("resnet_mnist", "data")


def write_idx(path: Path, values: Any) -> None:
    values = np.asarray(values, np.uint8)
    header = struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape)
    path.write_bytes(gzip.compress(header + values.tobytes()))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    images = np.random.default_rng(0).integers(0, 256, (9, 28, 28))
    write_idx(tmp_path / "train-images-idx3-ubyte.gz", images[:6])
    write_idx(tmp_path / "train-labels-idx1-ubyte.gz", [3, 1, 4, 1, 5, 9])
    write_idx(tmp_path / "t10k-images-idx3-ubyte.gz", images[6:])
    write_idx(tmp_path / "t10k-labels-idx1-ubyte.gz", [2, 7, 1])
    return tmp_path


def torchvision_names() -> set[str]:
    def batch_norm(name: str) -> set[str]:
        buffers = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
        return {f"{name}.{buffer}" for buffer in buffers}

    names = {"conv1.weight", "fc.weight", "fc.bias"} | batch_norm("bn1")
    for block in (f"layer{stage}.{i}" for stage in range(1, 5) for i in range(2)):
        for k in (1, 2):
            names |= {f"{block}.conv{k}.weight"} | batch_norm(f"{block}.bn{k}")
        if block in ("layer2.0", "layer3.0", "layer4.0"):
            names |= {f"{block}.downsample.0.weight"} | batch_norm(f"{block}.downsample.1")
    return names


def test_state_dict_has_torchvisions_names_and_shapes(model: Any) -> None:
    state = model.ResNet18().state_dict()
    assert set(state) == torchvision_names()
    assert state["conv1.weight"].shape == (64, 1, 7, 7)
    assert state["layer3.0.conv1.weight"].shape == (256, 128, 3, 3)
    assert state["layer4.0.downsample.0.weight"].shape == (512, 256, 1, 1)
    assert state["fc.weight"].shape == (10, 512)


def test_parameter_count(model: Any) -> None:
    # torchvision's 11,689,512, less two input channels and 990 classes.
    expected = 11_689_512 - 2 * 64 * 49 - 990 * 513
    assert sum(p.numel() for p in model.ResNet18().parameters()) == expected


def test_forward_halves_five_times(model: Any) -> None:
    resnet = model.ResNet18(width_divisor=16)
    shapes: list[torch.Size] = []
    for name in ("conv1", "maxpool", "layer1", "layer2", "layer3", "layer4"):
        getattr(resnet, name).register_forward_hook(lambda _module, _input, output: shapes.append(output.shape))
    assert resnet(torch.zeros(2, 1, 28, 28)).shape == (2, 10)
    assert [tuple(shape[1:]) for shape in shapes] == [
        (4, 14, 14), (4, 7, 7), (4, 7, 7), (8, 4, 4), (16, 2, 2), (32, 1, 1)
    ]  # fmt: skip


@pytest.mark.parametrize("divisor", [0, 3, 128])
def test_width_must_divide(model: Any, divisor: int) -> None:
    with pytest.raises(ValueError, match=f"which {divisor} does not"):
        model.ResNet18(width_divisor=divisor)


def test_reads_the_four_files(data: Any, folder: Path) -> None:
    train, test = data.load(str(folder))
    assert train.labels.tolist() == [3, 1, 4, 1, 5, 9] and test.labels.tolist() == [2, 7, 1]
    images, labels = train.__getitems__([5, 2])
    assert images.shape == (2, 1, 28, 28) and images.dtype == torch.uint8 and labels.tolist() == [9, 4]
    expected = np.random.default_rng(0).integers(0, 256, (9, 28, 28))
    assert np.array_equal(images[:, 0].numpy(), expected[[5, 2]])
    assert np.array_equal(test.images[:, 0].numpy(), expected[6:])
    assert torch.equal(train[5][0], images[0]) and train[5][1] == 9


def test_limit_and_batches(data: Any, folder: Path) -> None:
    train, test = data.load(str(folder), limit=5)
    assert (len(train), len(test)) == (5, 3)
    loader = DataLoader(train, batch_size=2, collate_fn=data.keep_batch)
    assert [labels.tolist() for _, labels in loader] == [[3, 1], [4, 1], [5]]


def test_normalise_spans_minus_one_to_one(data: Any) -> None:
    assert data.normalise(torch.tensor([0, 51, 255], dtype=torch.uint8)).tolist() == pytest.approx([-1.0, -0.6, 1.0])


@pytest.mark.parametrize(
    "content",
    [
        b"not gzip",
        gzip.compress(b"\0\0\x08\x01" + bytes([0, 0, 0, 6]) + b"123456")[:-9],
        gzip.compress(b"\0\0\x08\x01" + bytes([0, 0, 0, 6]) + b"12345"),
        gzip.compress(b"\0\0\x0d\x01" + bytes([0, 0, 0, 6]) + b"123456"),
        gzip.compress(b"\0\0\x08"),
    ],
    ids=["not gzip", "gzip cut short", "values cut short", "floats", "header cut short"],
)
def test_damaged_file_is_named(data: Any, folder: Path, content: bytes) -> None:
    (folder / "train-labels-idx1-ubyte.gz").write_bytes(content)
    with pytest.raises(DataError, match="train-labels-idx1-ubyte"):
        data.load(str(folder))


def test_images_and_labels_must_belong_together(data: Any, folder: Path) -> None:
    write_idx(folder / "t10k-labels-idx1-ubyte.gz", [2, 7])
    with pytest.raises(DataError, match="3 images but 2 labels"):
        data.load(str(folder))


class FakeRun:
    device = torch.device("cpu")

    def sum(self, value: Tensor) -> Tensor:
        return value


def test_evaluate_uses_running_statistics(load_recipe: LoadRecipe, model: Any, data: Any, folder: Path) -> None:
    resnet = model.ResNet18(width_divisor=16)
    before = {name: value.clone() for name, value in resnet.state_dict().items()}
    train, _ = data.load(str(folder))
    loader = DataLoader(train, batch_size=4, collate_fn=data.keep_batch)  # 4 and 2
    loss, accuracy = load_recipe("resnet_mnist", "train").evaluate(FakeRun(), resnet, loader)
    assert resnet.training and all(torch.equal(value, before[name]) for name, value in resnet.state_dict().items())
    logits = resnet.eval()(data.normalise(train.images))
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits, train.labels).detach())
    torch.testing.assert_close(accuracy, (logits.argmax(1) == train.labels).float().mean())
