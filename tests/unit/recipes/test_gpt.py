"""The GPT is causal, and its windows stay inside their part of the text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from keepstep.errors import DataError

LoadRecipe = Callable[[str, str], ModuleType]
HIGHEST = 1 - 2**-24  # the largest float32 below 1
TEXT = torch.arange(101, dtype=torch.uint8)


@pytest.fixture
def model(load_recipe: LoadRecipe) -> Any:
    return load_recipe("gpt", "model")


@pytest.fixture
def data(load_recipe: LoadRecipe) -> Any:
    return load_recipe("gpt", "data")


def draw(monkeypatch: pytest.MonkeyPatch, value: float, num_samples: int) -> None:
    monkeypatch.setattr("keepstep.sample_uniforms", lambda count: torch.full((num_samples, count), value))


def test_default_model(model: Any) -> None:
    gpt = model.GPT()
    block = (4 * 128 * 128 + 4 * 128) + (8 * 128 * 128 + 5 * 128) + 2 * 2 * 128
    assert sum(p.numel() for p in gpt.parameters()) == 2 * 256 * 128 + 128 * 128 + 4 * block + 2 * 128
    assert gpt(torch.zeros(2, 128, dtype=torch.long)).shape == (2, 128, 256)


def test_starts_as_a_uniform_guess(model: Any) -> None:
    gpt = model.GPT(sequence=16).eval()
    tokens = torch.randint(0, 256, (4, 17))
    loss = F.cross_entropy(gpt(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    assert loss.item() == pytest.approx(torch.tensor(256.0).log().item(), abs=0.1)


def test_model_never_looks_ahead(model: Any) -> None:
    gpt = model.GPT(sequence=12, num_layers=2, num_heads=2, hidden=16).eval()
    tokens = torch.randint(0, 256, (1, 12))
    changed = tokens.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 256
    same = (gpt(tokens) == gpt(changed)).all(-1)[0]
    assert same[:7].all() and not same[7:].any()


def test_dropout_only_in_training(model: Any) -> None:
    gpt = model.GPT(sequence=8, num_layers=1, num_heads=2, hidden=16, dropout=0.5)
    tokens = torch.randint(0, 256, (2, 8))
    assert not torch.equal(gpt(tokens), gpt(tokens))
    gpt.eval()
    assert torch.equal(gpt(tokens), gpt(tokens))


def test_model_refuses_what_does_not_divide(model: Any) -> None:
    with pytest.raises(ValueError, match="3 heads"):
        model.GPT(num_heads=3)


def test_window_and_what_follows(data: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    draw(monkeypatch, 0.5, num_samples=2)
    x, y = data.RandomWindows(TEXT, sequence=5, num_windows=8).__getitems__([6, 0])
    assert x.tolist() == [[78, 79, 80, 81, 82], [6, 7, 8, 9, 10]]  # (6.5 and 0.5) * 96 / 8
    assert torch.equal(y, x + 1) and x.dtype == y.dtype == torch.int64


@pytest.mark.parametrize("num_windows", [1, 7, 96, 1000])
def test_windows_reach_both_ends_and_no_further(data: Any, monkeypatch: pytest.MonkeyPatch, num_windows: int) -> None:
    windows = data.RandomWindows(TEXT, sequence=5, num_windows=num_windows)
    draw(monkeypatch, 0.0, num_samples=1)
    assert windows[0][0][0] == 0
    draw(monkeypatch, HIGHEST, num_samples=1)
    assert windows[len(windows) - 1][1][-1] == 100


def test_tiles_predict_every_byte_once(data: Any) -> None:
    tiles = data.TiledWindows(TEXT, sequence=10)
    loader = DataLoader(tiles, batch_size=4, collate_fn=data.keep_batch)
    batches = list(loader)
    assert [len(x) for x, _ in batches] == [4, 4, 2]
    assert torch.cat([y.flatten() for _, y in batches]).tolist() == list(range(1, 101))
    assert torch.equal(tiles[3][0], batches[0][0][3])


def test_held_out_tail_is_never_trained_on(data: Any, tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(bytes(range(200)))
    train, test = data.load(str(tmp_path / "text"), max_bytes=150, sequence=10, num_windows=64, held_out=0.2)
    assert len(train) == 64 and train.text.tolist() == list(range(120))
    assert len(test) == 2 and test.text.tolist() == list(range(120, 150))


def test_standard_library_is_the_default(data: Any) -> None:
    train, test = data.load(None, max_bytes=100_000, sequence=64, num_windows=10, held_out=0.02)
    text = bytes(torch.cat([train.text, test.text]).tolist())
    assert len(text) == 100_000 and b"import " in text
    assert data.read_standard_library(50_000).tolist() == list(text[:50_000])


@pytest.mark.parametrize("size", [0, 30])
def test_text_too_short(data: Any, tmp_path: Path, size: int) -> None:
    (tmp_path / "text").write_bytes(bytes(size))
    with pytest.raises(DataError, match=f"{size} bytes.*--sequence"):
        data.load(str(tmp_path / "text"), max_bytes=1000, sequence=16, num_windows=4, held_out=0.5)


def test_text_that_is_not_there(data: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nothing\.txt"):
        data.load(str(tmp_path / "nothing.txt"), max_bytes=1000, sequence=16, num_windows=4, held_out=0.5)


class FakeRun:
    device = torch.device("cpu")

    def sum(self, value: Tensor) -> Tensor:
        return value


def test_evaluate_is_the_mean_over_all_bytes(load_recipe: LoadRecipe, model: Any, data: Any) -> None:
    gpt = model.GPT(sequence=10, num_layers=1, num_heads=2, hidden=16, dropout=0.5)
    tiles = data.TiledWindows(TEXT, sequence=10)
    loader = DataLoader(tiles, batch_size=4, collate_fn=data.keep_batch)  # 4, 4 and 2
    loss = load_recipe("gpt", "train").evaluate(FakeRun(), gpt, loader, sequence=10)
    assert gpt.training
    x, y = tiles.__getitems__(list(range(10)))
    torch.testing.assert_close(loss, F.cross_entropy(gpt.eval()(x).flatten(0, 1), y.flatten()).detach())


def test_weight_decay_is_for_matrices(load_recipe: LoadRecipe, model: Any) -> None:
    gpt = model.GPT(num_layers=1)
    matrices, vectors = load_recipe("gpt", "train").decayed(gpt, 0.1)
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.1, 0.0)
    assert all(p.dim() == 2 for p in matrices["params"]) and all(p.dim() == 1 for p in vectors["params"])
    assert len(matrices["params"]) + len(vectors["params"]) == len(list(gpt.parameters()))


def test_epochs_must_divide_steps(load_recipe: LoadRecipe, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load_recipe("gpt", "train").parse(["--steps", "200", "--epochs", "3"])
    assert "--epochs 3 does not divide --steps 200" in capsys.readouterr().err
