"""The ViT, the CIFAR-10 readers and their cache, and the augmentation against a plain per-sample version."""

from __future__ import annotations

import io
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from keepstep.errors import DataError

LoadRecipe = Callable[[str, str], ModuleType]
Records = npt.NDArray[np.uint8]
NUM_RECORDS = 2  # in each of the six files


@pytest.fixture
def model(load_recipe: LoadRecipe) -> Any:
    return load_recipe("vit_cifar10", "model")


@pytest.fixture
def data(load_recipe: LoadRecipe) -> Any:
    return load_recipe("vit_cifar10", "data")


@pytest.fixture
def records() -> Records:
    values = np.random.default_rng(0).integers(0, 256, (6 * NUM_RECORDS, 3073), dtype=np.uint8)
    values[:, 0] %= 10
    return values


@pytest.fixture
def uniforms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands in for keepstep's draw, which needs a loader that it prepared."""
    monkeypatch.setattr("keepstep.sample_uniforms", lambda count: torch.full((3, count), 0.25))


def write_binary(folder: Path, records: Records) -> Path:
    folder.mkdir()
    names = [f"data_batch_{k}" for k in range(1, 6)] + ["test_batch"]
    with tarfile.open(folder / "cifar-10-binary.tar.gz", "w:gz") as tar:
        for name, part in zip(names, np.split(records, 6), strict=True):
            entry = tarfile.TarInfo(f"cifar-10-batches-bin/{name}.bin")
            entry.size = part.nbytes
            tar.addfile(entry, io.BytesIO(part.tobytes()))
    return folder


def write_parquet(folder: Path, records: Records) -> Path:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    folder.mkdir()
    names = [f"train-{k:05}-of-00005" for k in range(5)] + ["test-00000-of-00001"]
    for name, part in zip(names, np.split(records, 6), strict=True):
        images = [{"bytes": as_png(record[1:]), "path": f"{i}.png"} for i, record in enumerate(part)]
        pq.write_table(pa.table({"image": images, "label": part[:, 0].astype(np.int64)}), folder / f"{name}.parquet")
    return folder


def as_png(planes: Records) -> bytes:
    image = pytest.importorskip("PIL.Image")
    buffer = io.BytesIO()
    image.fromarray(planes.reshape(3, 32, 32).transpose(1, 2, 0).copy()).save(buffer, format="png")
    return buffer.getvalue()


def test_default_model(model: Any) -> None:
    vit = model.ViT()
    block = (4 * 384 * 384 + 4 * 384) + (2 * 384 * 768 + 768 + 384) + 2 * 2 * 384
    patches, positions, norm, head = 384 * 48 + 384, 64 * 384, 2 * 384, 384 * 10 + 10
    assert sum(p.numel() for p in vit.parameters()) == patches + positions + 12 * block + norm + head
    assert vit(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


def test_every_patch_and_parameter_counts(model: Any) -> None:
    vit = model.ViT(num_layers=2, num_heads=2, hidden=16, mlp=24)
    images = torch.randn(1, 3, 32, 32, requires_grad=True)
    torch.autograd.backward(F.cross_entropy(vit(images), torch.tensor([1])))
    assert images.grad is not None and bool(F.avg_pool2d(images.grad.abs(), 4).gt(0).all())
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in vit.parameters())


def test_model_refuses_what_does_not_divide(model: Any) -> None:
    with pytest.raises(ValueError, match="7 heads"):
        model.ViT(num_heads=7)


@pytest.mark.parametrize("write", [write_binary, write_parquet])
def test_reads_both_forms(
    data: Any, records: Records, tmp_path: Path, cache: Path, uniforms: None, write: Callable[[Path, Records], Path]
) -> None:
    train, test = data.load(str(write(tmp_path / "data", records)))
    assert (len(train), len(test)) == (5 * NUM_RECORDS, NUM_RECORDS)
    images, labels, randoms = train.__getitems__([7, 0, 3])
    assert images.dtype == torch.uint8 and labels.dtype == torch.int64 and randoms.shape == (3, 3)
    assert np.array_equal(images.numpy(), records[[7, 0, 3], 1:].reshape(3, 3, 32, 32))
    assert labels.tolist() == records[[7, 0, 3], 0].tolist()
    assert np.array_equal(test.images.numpy().reshape(NUM_RECORDS, -1), records[5 * NUM_RECORDS :, 1:])
    image, label, _ = train[7]
    assert torch.equal(image, images[0]) and label == labels[0]


def test_limit_cuts_both_sets(data: Any, records: Records, tmp_path: Path, cache: Path) -> None:
    train, test = data.load(str(write_binary(tmp_path / "data", records)), limit=1)
    assert (len(train), len(test)) == (1, 1)


def test_loader_gets_whole_batches(data: Any, records: Records, uniforms: None) -> None:
    loader = DataLoader(data.Cifar10(records), batch_size=3, collate_fn=data.keep_batch)
    assert [images.shape for images, _, _ in loader] == [(3, 3, 32, 32)] * 4


def test_decodes_once(
    data: Any, records: Records, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_binary(tmp_path / "data", records)
    first, _ = data.load(str(folder))
    monkeypatch.setattr(data, "_decode_binary", lambda *_: pytest.fail("decoded again"))
    second, _ = data.load(str(folder))
    assert torch.equal(first.images, second.images)
    assert not list(cache.glob("**/*.part"))


def test_other_files_are_decoded_anew(data: Any, records: Records, tmp_path: Path, cache: Path) -> None:
    data.load(str(write_binary(tmp_path / "one", records)))
    other, _ = data.load(str(write_binary(tmp_path / "other", records[::-1].copy())))
    assert other.labels.tolist() == records[::-1][: 5 * NUM_RECORDS, 0].tolist()


def test_damaged_archive(data: Any, records: Records, tmp_path: Path, cache: Path) -> None:
    archive = write_binary(tmp_path / "data", records) / "cifar-10-binary.tar.gz"
    archive.write_bytes(archive.read_bytes()[:5000])
    with pytest.raises(DataError, match=r"cifar-10-binary\.tar\.gz .* damaged"):
        data.load(str(archive.parent))


def test_damaged_parquet(data: Any, records: Records, tmp_path: Path, cache: Path) -> None:
    folder = write_parquet(tmp_path / "data", records)
    (folder / "train-00003-of-00005.parquet").write_bytes(b"PAR1 but no more")
    with pytest.raises(DataError, match=r"train-00003.* damaged"):
        data.load(str(folder))


def test_parquet_without_pyarrow_says_what_to_install(
    data: Any, records: Records, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_parquet(tmp_path / "data", records)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(DataError, match="pip install pyarrow pillow"):
        data.load(str(folder))


def plain_augment(image: Tensor, randoms: list[float]) -> Tensor:
    padded = torch.zeros(3, 40, 40, dtype=torch.uint8)
    padded[:, 4:36, 4:36] = image
    top, left = int(randoms[0] * 9), int(randoms[1] * 9)
    crop = padded[:, top : top + 32, left : left + 32]
    return crop.flip(2) if randoms[2] < 0.5 else crop


def test_augment_is_a_crop_and_a_flip(data: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (64, 3, 32, 32), dtype=torch.uint8, generator=generator)
    randoms = torch.rand(64, 3, generator=generator)
    expected = [plain_augment(image, row) for image, row in zip(images, randoms.tolist(), strict=True)]
    assert torch.equal(data.augment(images, randoms), torch.stack(expected))


def test_augment_reaches_the_ends_of_the_range(data: Any) -> None:
    highest = float(np.nextafter(np.float32(1), np.float32(0)))
    images = torch.randint(1, 256, (4, 3, 32, 32), dtype=torch.uint8)
    randoms = torch.tensor([[0.0, 0.0, 0.5], [highest, highest, 0.5], [0.5, 0.5, 0.5], [0.5, 0.5, 0.0]])
    first, last, centre, flipped = data.augment(images, randoms)
    assert torch.equal(first[:, 4:, 4:], images[0, :, :28, :28]) and int(first[:, :4].sum()) == 0
    assert torch.equal(last[:, :28, :28], images[1, :, 4:, 4:]) and int(last[:, :, 28:].sum()) == 0
    assert torch.equal(centre, images[2]) and torch.equal(flipped, images[3].flip(2))


def test_augment_of_a_sample_does_not_depend_on_its_batch(data: Any) -> None:
    images, randoms = torch.randint(0, 256, (8, 3, 32, 32), dtype=torch.uint8), torch.rand(8, 3)
    before = images.clone()
    whole = data.augment(images, randoms)
    assert torch.equal(whole[[5, 2]], data.augment(images[[5, 2]], randoms[[5, 2]]))
    assert torch.equal(images, before)


def test_normalise(data: Any) -> None:
    images = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    mean, std = torch.tensor(data.MEAN).view(3, 1, 1), torch.tensor(data.STD).view(3, 1, 1)
    torch.testing.assert_close(data.normalise(images), (images / 255 - mean) / std)


class FakeRun:
    device = torch.device("cpu")

    def sum(self, value: Tensor) -> Tensor:
        return value


def test_evaluate_weighs_every_sample_alike(
    load_recipe: LoadRecipe, data: Any, model: Any, records: Records, uniforms: None
) -> None:
    vit = model.ViT(num_layers=1, num_heads=2, hidden=16, mlp=16)
    test_set = data.Cifar10(records)
    loader = DataLoader(test_set, batch_size=5, collate_fn=data.keep_batch)  # 5, 5 and 2
    loss, accuracy = load_recipe("vit_cifar10", "train").evaluate(FakeRun(), vit, loader)
    logits = vit(data.normalise(test_set.images))
    torch.testing.assert_close(loss, F.cross_entropy(logits, test_set.labels).detach())
    torch.testing.assert_close(accuracy, (logits.argmax(1) == test_set.labels).float().mean())
    assert vit.training


def rates_of(train: Any, schedule: str, num_steps: int) -> list[float]:
    args = train.parse(["--schedule", schedule, "--lr", "0.5"])
    optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=args.lr)
    scheduler = train.make_scheduler(optimizer, args, num_steps)
    rates = []
    for _ in range(num_steps):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return rates


def test_constant_schedule(load_recipe: LoadRecipe) -> None:
    assert rates_of(load_recipe("vit_cifar10", "train"), "constant", 5) == [0.5] * 5


def test_one_cycle_spans_the_run(load_recipe: LoadRecipe) -> None:
    rates = rates_of(load_recipe("vit_cifar10", "train"), "onecycle", 100)
    assert rates.index(max(rates)) in (29, 30) and max(rates) == pytest.approx(0.5)
    assert rates[-1] < 1e-4


def test_predict_decodes_and_normalises_as_training_does(load_recipe: LoadRecipe, model: Any, data: Any) -> None:
    from PIL import Image

    predict = load_recipe("vit_cifar10", "predict").predict
    planes = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8)
    files = [io.BytesIO() for _ in planes]
    for file, image in zip(files, planes, strict=True):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(file, "PNG")
    batch = {"image": np.array([{"bytes": file.getvalue(), "path": "x.png"} for file in files])}
    torch.manual_seed(0)
    vit = model.ViT(num_layers=1, num_heads=2, hidden=16, mlp=16).eval()
    with torch.inference_mode():
        found, expected = predict(vit, batch), vit(data.normalise(planes)).softmax(1)
    np.testing.assert_array_equal(found["predicted"], expected.argmax(1).numpy())
    np.testing.assert_allclose(found["probability"], expected.max(1).values.numpy())
