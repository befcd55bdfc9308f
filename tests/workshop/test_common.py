"""What the lessons share: orders of samples, counts of lines, command lines, judgements."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

sys.path.insert(0, str(Path(__file__).parents[2] / "workshop"))

from common import arguments
from common.checks import Wrong, expect_close, judge
from common.count import code_lines, count
from common.order import TorchOrder
from common.record import Record, read

SAMPLES, BATCH, WORKERS = 40, 8, 2


def shares_of_torch(epoch: int) -> list[list[int]]:
    """What each rank reads in each step, by torch's own sampler."""
    data = TensorDataset(torch.arange(SAMPLES))
    ranks = []
    for rank in range(WORKERS):
        sampler = DistributedSampler(data, WORKERS, rank, seed=3)
        sampler.set_epoch(epoch)
        loader = DataLoader(data, BATCH // WORKERS, sampler=sampler)
        ranks.append([batch.tolist() for (batch,) in loader])
    return [[*first, *second] for first, second in zip(*ranks, strict=True)]


def test_torchs_order_is_that_of_its_distributed_sampler() -> None:
    order = TorchOrder(SAMPLES, BATCH, WORKERS, seed=3)
    for epoch in range(2):
        indices = list(order)
        assert [indices[at : at + BATCH] for at in range(0, SAMPLES, BATCH)] == shares_of_torch(epoch)


def test_torchs_order_goes_on_where_it_was() -> None:
    whole, begun, resumed = (TorchOrder(SAMPLES, BATCH, WORKERS) for _ in range(3))
    expected = [*whole, *whole]
    list(begun)
    reading = iter(begun)
    read_before = [next(reading) for _ in range(11)]
    resumed.load_state_dict(begun.state_dict())
    assert [*expected[:SAMPLES], *read_before, *resumed] == expected


SCRIPT = '''"""A docstring
of two lines."""

import torch  # a comment

# a comment alone
text = """a string
that is code"""


def step():
    """Another docstring."""
    dist.init()  # [1]
    dist.set(
        1,  # [2]
    )
'''


def test_only_code_is_counted() -> None:
    assert code_lines(SCRIPT) == [
        "import torch", 'text = """a string', 'that is code"""', "def step():", "    dist.init()", "    dist.set(",
        "        1,", "    )",
    ]  # fmt: skip


def test_boilerplate_is_what_is_numbered_and_changed_is_what_is_new(tmp_path: Path) -> None:
    before, after = tmp_path / "before.py", tmp_path / "after.py"
    before.write_text("import torch\n\n\ndef step():\n    pass\n")
    after.write_text(SCRIPT)
    assert count(after, before) == (8, 2, 2, 6)
    assert count(before, before) == (3, 0, 0, 0)


def test_without_a_gpu_everything_is_small_unless_all_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    small = arguments.parse(arguments.parser(None), [])
    assert (small.use_gpu, small.small, small.limit) == (False, True, arguments.CPU_LIMIT)
    whole = arguments.parse(arguments.parser(None), ["--full"])
    assert (whole.small, whole.limit, whole.batch_size) == (False, None, 512)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--use-gpu", "True"], "no GPU here: leave it out or say --use-gpu False"),
        (["--use-gpu", "perhaps"], "neither True nor False"),
        (["--epochs", "0"], "--epochs is 0; at least 1 is needed"),
    ],
)
def test_bad_input_says_what_to_do(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        arguments.parse(argparse.ArgumentParser(parents=[arguments.parser(None)], add_help=False), words)
    assert said in capsys.readouterr().err


def test_a_record_is_read_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = Record(str(tmp_path))
    record.epoch(0, train_loss=2.0, test_loss=1.5, accuracy=0.25)
    (line,) = read(tmp_path)
    assert (line["train_loss"], line["test_loss"], line["accuracy"]) == (2.0, 1.5, 0.25)
    assert "accuracy 25.00%" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        ("def answer(): raise NotImplementedError", "nothing is written yet"),
        ("def answer(): return 1 / 0", "it raised ZeroDivisionError"),
        ("def answer(): return 'two'", "a number was expected, 'two' was found"),
        ("def answer(): return 3", "the sum: 3 is not right"),
        ("def answer(", "it raised SyntaxError"),
    ],
)
def test_what_is_not_right_gets_a_hint(answer: str, hint: str, tmp_path: Path) -> None:
    (tmp_path / "checks.py").write_text(
        "from common.checks import expect_close\ndef check_1(answer): expect_close(answer.answer(), 2, 'the sum')"
    )
    (tmp_path / "1_sum.py").write_text(answer)
    (judgement,) = judge(tmp_path)
    assert not judgement.right and hint in judgement.hint


def test_close_is_close() -> None:
    expect_close(2.0000001, 2, "it")
    with pytest.raises(Wrong):
        expect_close(True, 1, "it")
