"""The loop's companion in one process: boundaries, resume, damage, and what a wrong loop is told."""

from __future__ import annotations

import atexit
import gc
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, TensorDataset

from keepstep import current
from keepstep.checkpoint.store import Store
from keepstep.errors import ConfigError, LoopError, Stopped
from keepstep.folder import RunFolder
from keepstep.run import Run

Start = Callable[..., Run]
NUM_SAMPLES, BATCH_SIZE, BATCHES = 8, 2, 4


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """`start(...)` begins or resumes the run `test`, as another process would after the last one was killed."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(sys, "argv", ["train.py"])

    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def begin(**settings: Any) -> Run:
        kill()
        defaults = {"name": "test", "storage": str(tmp_path), "device": "cpu", "checkpoint_mode": "sync"}
        return current.start(**{**defaults, **settings})

    def kill() -> None:
        run = current.abandon()
        if run is not None:
            run.close()

    yield begin
    kill()
    for number, handler in handlers.items():
        signal.signal(number, handler)
    atexit.unregister(current._at_exit)


class Training:
    """A small job, which notes the samples of every step."""

    def __init__(self, run: Run, **loader: Any) -> None:
        self.run = run
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        data = TensorDataset(torch.arange(float(NUM_SAMPLES))[:, None])
        options = {"batch_size": BATCH_SIZE, "shuffle": True, **loader}
        self.model, self.optimizer, self.loader = run.prepare(self.model, self.optimizer, DataLoader(data, **options))
        self.samples: list[list[float]] = []
        self.losses: list[float] = []

    def step(self, x: torch.Tensor) -> None:
        loss = self.model(x).pow(2).mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.run.log(loss=loss)
        self.samples.append(x.flatten().tolist())
        self.losses.append(loss.item())

    def epochs(self, count: int, stop_at: int | None = None, **logged: Any) -> Training:
        """Trains; is killed as step `stop_at` begins."""
        for epoch in self.run.epochs(count):
            for (x,) in self.run.steps(self.loader):
                if self.run.step == stop_at:
                    return self
                self.step(x)
            self.run.log(epoch_number=float(epoch), **logged)
        return self


def store_of(run: Run) -> Store:
    return Store(run.path / "checkpoints", keep=9)


def good_steps(run: Run) -> list[int]:
    store = store_of(run)
    good = []
    for step in store.steps():
        try:
            store.check(step)
        except Exception:
            continue
        good.append(step)
    return good


@pytest.mark.parametrize("every", ["1", "3", "1000"])
@pytest.mark.parametrize("stop_at", [1, 3, 4, 5, 7])
def test_a_killed_run_goes_on_bit_for_bit(start: Start, tmp_path: Path, every: str, stop_at: int) -> None:
    whole = Training(start(storage=str(tmp_path / "whole"))).epochs(2)
    first = Training(start(checkpoint_every=every)).epochs(2, stop_at=stop_at)
    second = Training(start(checkpoint_every=every)).epochs(2)
    resumed_from = 2 * BATCHES - len(second.losses)
    assert resumed_from == (0 if every == "1000" else stop_at // int(every) * int(every))
    assert first.losses[:resumed_from] + second.losses == whole.losses
    assert first.samples[:resumed_from] + second.samples == whole.samples
    for name, value in whole.model.state_dict().items():
        assert torch.equal(second.model.state_dict()[name], value)


def test_a_run_in_an_object_store_goes_on_where_nothing_is_in_the_cache(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("fsspec")
    address = f"memory://bucket{tmp_path}"
    whole = Training(start(storage=str(tmp_path / "whole"))).epochs(2)
    monkeypatch.setenv("KEEPSTEP_CACHE", str(tmp_path / "a"))
    first = Training(start(storage=address, checkpoint_every="3")).epochs(2, stop_at=5)
    monkeypatch.setenv("KEEPSTEP_CACHE", str(tmp_path / "b"))
    second = Training(start(storage=address, checkpoint_every="3")).epochs(2)
    assert first.losses[:3] + second.losses == whole.losses
    current.end()
    assert [line["step"] for line in RunFolder(address, "test").read_metrics()] == [1, 2, 3, 4, 4, 5, 6, 7, 8, 8]
    monkeypatch.setenv("KEEPSTEP_CACHE", str(tmp_path / "c"))
    with pytest.raises(SystemExit):
        start(storage=address)
    assert "run 'test' finished at step 8" in capsys.readouterr().out


def test_a_run_saved_between_epochs_trains_the_next_one(start: Start, tmp_path: Path) -> None:
    whole = Training(start(storage=str(tmp_path / "whole"))).epochs(2)
    Training(start(keep_best="epoch_number:max", checkpoint_every="1000")).epochs(2, stop_at=BATCHES)
    second = Training(start(keep_best="epoch_number:max", checkpoint_every="1000"))
    second.epochs(2)
    assert second.losses == whole.losses[BATCHES:]


def test_metrics_are_those_of_a_run_that_was_never_killed(start: Start, tmp_path: Path) -> None:
    Training(start(storage=str(tmp_path / "whole"))).epochs(2)
    current.end()
    Training(start(checkpoint_every="3")).epochs(2, stop_at=5)
    Training(start(checkpoint_every="3")).epochs(2)
    current.end()
    whole, resumed = RunFolder(tmp_path / "whole", "test"), RunFolder(tmp_path, "test")
    assert resumed.read_metrics() == whole.read_metrics()
    assert [line["step"] for line in resumed.read_metrics()] == [1, 2, 3, 4, 4, 5, 6, 7, 8, 8]
    assert resumed.finished and resumed.read_result()["step"] == 2 * BATCHES


def test_lost_metrics_do_not_stop_a_run(start: Start, tmp_path: Path) -> None:
    """metrics.jsonl was deleted: the run resumes, and what it writes from then on can be read."""
    run = start(checkpoint_every="3")
    Training(run).epochs(2, stop_at=5)
    (run.path / "metrics.jsonl").unlink()
    Training(start(checkpoint_every="3")).epochs(2)
    current.end()
    assert [line["step"] for line in RunFolder(tmp_path, "test").read_metrics()] == [4, 4, 5, 6, 7, 8, 8]


def damage(run: Run, step: int) -> None:
    (store_of(run).path(step) / "state.json").write_text("{}")


def test_a_damaged_checkpoint_is_passed_over_and_made_again(start: Start, tmp_path: Path) -> None:
    whole = Training(start(storage=str(tmp_path / "whole"))).epochs(2)
    run = start(checkpoint_every="2")
    Training(run).epochs(2, stop_at=7)
    damage(run, 6)
    second = Training(start(checkpoint_every="2")).epochs(2)
    assert second.losses == whole.losses[4:]
    assert good_steps(run) == store_of(run).steps() == [4, 6, 8]
    events = RunFolder(tmp_path, "test").read_events()
    assert any("step_00000006/state.json" in event.get("problem", "") for event in events)


def test_a_run_whose_checkpoints_are_all_damaged_begins_again_and_saves(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The bad ones neither stand in the place of good ones of the same step, nor push good ones out; and it says so."""
    run = start(checkpoint_every="1", keep=2)
    Training(run).epochs(2, stop_at=7)
    for step in store_of(run).steps():
        damage(run, step)
    metrics = (run.path / "metrics.jsonl").read_text()
    again = start(checkpoint_every="1", keep=2)
    Training(again).epochs(2, stop_at=4)
    assert good_steps(again) == [3, 4]
    (kept,) = run.path.glob("metrics-of-lost-checkpoints-*.jsonl")
    assert kept.read_text() == metrics
    loud = "no good checkpoint is left: starting from step 0; the bad ones are kept as damaged-…"
    assert f"keepstep: {loud}, the metrics so far as {kept.name}\n" in capsys.readouterr().err
    (event,) = (e for e in RunFolder(tmp_path, "test").read_events() if e["event"] == "no_checkpoint_left")
    assert event["metrics_kept"] == kept.name
    Training(start(checkpoint_every="1", keep=2)).epochs(2)
    assert good_steps(again) == store_of(again).steps() == [7, 8]


def test_what_an_interrupted_save_left_behind_is_swept(start: Start) -> None:
    """A worker that is killed while it saves leaves gigabytes; ten of them would fill the disk."""
    run = start(checkpoint_every="2")
    Training(run).epochs(2, stop_at=3)
    left = store_of(run).begin(4, "killed")
    (left / "rank_00000.safetensors").write_bytes(b"half")
    Training(start(checkpoint_every="2")).epochs(2)
    assert not left.exists()


def test_the_best_epochs_checkpoint_is_kept(start: Start) -> None:
    run = start(keep=1, keep_best="epoch_number:min", checkpoint_every="1000")
    Training(run).epochs(3)
    assert store_of(run).steps() == [BATCHES, 3 * BATCHES]
    assert store_of(run).best() == {"step": BATCHES, "metric": "epoch_number", "value": 0.0}


def test_an_epoch_without_a_number_is_never_the_best(start: Start) -> None:
    """A metric that is NaN once must not keep every later epoch from being better."""
    run = start(keep=1, keep_best="score:max", checkpoint_every="1000")
    training = Training(run)
    for epoch in run.epochs(3):
        for (x,) in run.steps(training.loader):
            training.step(x)
        run.log(score=[float("nan"), 0.5, 0.25][epoch])
    best = store_of(run).best()
    assert best is not None and (best["step"], best["value"]) == (2 * BATCHES, 0.5)


def test_a_metric_that_no_epoch_logs_cannot_choose_the_best(start: Start) -> None:
    run = start(keep_best="accuracy:max")
    with pytest.raises(
        ConfigError, match="--keep-best names 'accuracy', which no epoch has logged; logged: epoch_number, loss"
    ):
        Training(run).epochs(2)
    assert store_of(run).steps() == [2 * BATCHES], "what was trained is not lost"


def test_a_request_to_stop_saves_and_leaves(start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = Training(start(storage=str(tmp_path / "whole"))).epochs(2)
    run = start(checkpoint_every="1000")
    first = Training(run)

    def until_asked() -> None:
        for _ in run.epochs(2):
            for (x,) in run.steps(first.loader):
                first.step(x)
                if run.step == 2:
                    signal.raise_signal(signal.SIGTERM)
                    run._exchange._next = 0  # workers look for requests about once a second

    with pytest.raises(Stopped) as leaving:
        until_asked()
    assert leaving.value.code == 75 and run.stopped
    assert store_of(run).steps() == [3]
    second = Training(start()).epochs(2)
    assert first.losses + second.losses == whole.losses


def test_a_break_saves_nothing_and_counts_an_update_that_was_made(start: Start) -> None:
    run = start(checkpoint_every="1")
    training = Training(run)
    for _ in run.epochs(1):
        for (x,) in run.steps(training.loader):
            if run.step == 2:
                break
            training.step(x)
        assert run.step == 2
        for (x,) in run.steps(training.loader):
            training.step(x)
            break
        assert run.step == 3
        assert store_of(run).steps() == [1, 2]


def test_parts_of_a_batch_make_one_step_and_its_gradient(start: Start) -> None:
    """Three parts of four samples, unevenly: the gradient is that of the whole batch's mean."""
    run = start()
    model, optimizer = nn.Linear(1, 1, bias=False), None
    data = TensorDataset(torch.tensor([[1.0], [2.0], [3.0], [10.0]]))
    model, loader = run.prepare(model, DataLoader(data, batch_size=4))
    assert optimizer is None
    for _ in run.epochs(1):
        for (x,) in run.steps(loader):
            sizes = []
            for part in run.micro(x, 3):
                sizes.append(len(part))
                loss = model(part).mean()
                (loss / 3).backward()
                run.log(output=loss)
            assert sum(sizes) == 4 and len(sizes) == 3
            assert model.weight.grad.item() == pytest.approx(4.0)
            weight = model.weight.item()
    assert run.step == 1
    assert run._metrics.latest["output"] == pytest.approx(4.0 * weight)


def test_a_batch_cannot_be_cut_into_no_parts(start: Start) -> None:
    with pytest.raises(LoopError, match=r"run.micro\(batch, 0\) cannot divide 2 sample\(s\) into 0 part\(s\)"):
        next(start().micro(torch.ones(2, 1), 0))


def test_a_last_batch_smaller_than_its_parts_gives_the_gradient_of_the_whole(start: Start) -> None:
    run = start()
    model = run.prepare(torch.nn.Linear(1, 1))
    batch = torch.tensor([[1.0], [5.0]])
    for part in run.micro(batch, 3):
        (model(part).mean() / 3).backward()
    assert model.weight.grad.item() == pytest.approx(3.0)


def test_numbers_drawn_in_an_epochs_beginning_are_drawn_again(start: Start, tmp_path: Path) -> None:
    def drawn(run: Run, stop_at: int | None = None) -> list[float]:
        training, numbers = Training(run), []
        for _ in run.epochs(2):
            numbers.append(torch.rand(()).item())
            for (x,) in run.steps(training.loader):
                if run.step == stop_at:
                    return numbers
                training.step(x)
        return numbers

    whole = drawn(start(storage=str(tmp_path / "whole")))
    drawn(start(checkpoint_every="1"), stop_at=BATCHES + 2)
    assert drawn(start(checkpoint_every="1")) == whole[1:]


@pytest.mark.parametrize("training_mode", [True, False])
def test_ddp_averages_gradients_in_eval_mode_too(
    start: Start, monkeypatch: pytest.MonkeyPatch, training_mode: bool
) -> None:
    """Fine-tuning with BatchNorm frozen, or a `model.train()` that was forgotten: workers must not drift apart."""
    calls: list[bool] = []
    plain = DistributedDataParallel.forward

    def forward(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
        calls.append(self.module.training)
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(DistributedDataParallel, "forward", forward)
    training = Training(start(strategy="ddp"))
    training.model.train(training_mode)
    training.epochs(1)
    assert len(calls) == BATCHES


def test_ddp_is_left_out_of_an_evaluation(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its forward would wait for workers that have fewer batches."""
    training = Training(start(strategy="ddp"))
    monkeypatch.setattr(DistributedDataParallel, "forward", lambda *_: pytest.fail("DDP in an evaluation"))
    training.model.eval()
    for (x,) in training.loader:
        training.model(x)


def test_wrong_loops_are_told_what_to_do(start: Start) -> None:
    run = start()
    training = Training(run)
    with pytest.raises(LoopError, match=r"run.steps\(...\) got a list; give it a DataLoader that run.prepare returned"):
        next(run.steps([1]))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"run.prepare\(...\) got a int; it takes models"):
        run.prepare(3)
    with pytest.raises(LoopError, match=r"the loop ended without a step: iterate over run.steps"):
        for _ in run.epochs(1):
            for _batch in training.loader:
                pass
    with pytest.raises(LoopError, match=r"run.prepare\(...\) came after the loop had begun"):
        run.prepare(nn.Linear(1, 1))
    with pytest.raises(LoopError, match=r"run.track\('x', ...\) came after the loop had begun"):
        run.track("x", training.optimizer)
    with pytest.raises(LoopError, match=r"a Linear that run.prepare was not given"):
        run.clip_grad_norm(nn.Linear(1, 1), 1.0)


def test_a_finished_run_is_not_run_again(start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    Training(start()).epochs(1)
    current.end()
    with pytest.raises(SystemExit) as leaving:
        start()
    assert leaving.value.code == 0
    assert "run 'test' finished at step 4; another name starts a new one" in capsys.readouterr().out
    is_held = RunFolder(tmp_path, "test").is_held()
    with warnings.catch_warnings(action="ignore", category=ResourceWarning):  # of a lock that was left open
        del leaving
        gc.collect()
    assert not is_held, "a notebook goes on after it"
    assert signal.getsignal(signal.SIGTERM) is before


def test_two_loaders_are_shuffled_and_augmented_independently(start: Start) -> None:
    """Else sample i of one domain would always meet sample i of the other, as in no plain PyTorch loop."""

    class Noisy(Dataset[Any]):
        def __len__(self) -> int:
            return 64

        def __getitem__(self, index: int) -> Any:
            return index, torch.rand(())

    first, second = start().prepare(*(DataLoader(Noisy(), batch_size=64, shuffle=True) for _ in range(2)))
    (a,), (b,) = ([batch.data for batch in loader.training_pass()] for loader in (first, second))
    assert not torch.equal(a[0], b[0])
    assert not torch.equal(a[1][a[0].argsort()], b[1][b[0].argsort()])


def test_two_loaders_each_resume_where_they_were(start: Start, tmp_path: Path) -> None:
    """An epoch with a pass over each: killed in the second, the first is not run again."""

    def seen(run: Run, stop_at: int | None = None) -> list[float]:
        model = nn.Linear(1, 1)
        data = TensorDataset(torch.arange(4.0)[:, None])
        first, second = (DataLoader(data, batch_size=2, shuffle=True) for _ in range(2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        model, optimizer, first, second = run.prepare(model, optimizer, first, second)
        samples: list[float] = []
        for _ in run.epochs(2):
            for loader in (first, second):
                for (x,) in run.steps(loader):
                    if run.step == stop_at:
                        return samples
                    model(x).sum().backward()
                    optimizer.step()
                    samples += x.flatten().tolist()
        return samples

    whole = seen(start(storage=str(tmp_path / "whole")))
    for stop_at in range(1, 8):
        storage = str(tmp_path / f"stopped_{stop_at}")
        before = seen(start(storage=storage, checkpoint_every="1"), stop_at)
        assert before + seen(start(storage=storage, checkpoint_every="1")) == whole
