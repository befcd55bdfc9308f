"""Bad input gets one clear line (what was found, expected, to do), a non-zero exit, and nothing is lost."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from e2e.conftest import Shell

GOOD = """
import sys, torch, keepstep
from torch.utils.data import DataLoader, TensorDataset
run = keepstep.start()
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
train = DataLoader(TensorDataset(torch.randn(24, 4), torch.randn(24, 2)), batch_size={batch})
{before}
model, optimizer, train = run.prepare(model, optimizer, train)
for epoch in run.epochs({epochs}):
    for x, y in {loop}:
        loss = ((model(x) - y) ** 2).mean()
        {backward}
        optimizer.step(); optimizer.zero_grad()
        run.log(loss=loss)
        {body}
"""
DEFAULTS = {
    "batch": "8",
    "before": "",
    "epochs": "2",
    "loop": "run.steps(train)",
    "backward": "loss.backward()",
    "body": "",
}

Keepstep = Callable[..., subprocess.CompletedProcess[str]]


def script(folder: Path, **changes: str) -> str:
    path = folder / "train.py"
    path.write_text(GOOD.format(**{**DEFAULTS, **changes}))
    return str(path)


@pytest.fixture
def keepstep(shell: Shell) -> Keepstep:
    return partial(shell, "keepstep")


def complaint(done: subprocess.CompletedProcess[str], code: int) -> str:
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("keepstep: ")]
    assert lines
    return done.stderr


def test_batch_that_does_not_divide(keepstep: Keepstep, tmp_path: Path) -> None:
    text = complaint(keepstep("run", "--workers", "3", script(tmp_path)), 2)
    assert "a batch of 8 does not divide between 3 workers" in text
    assert "use 6 or 9" in text


def test_missing_script(keepstep: Keepstep, tmp_path: Path) -> None:
    (tmp_path / "other.py").touch()
    text = complaint(keepstep("run", "trian.py"), 2)
    assert "there is no script trian.py; there are other.py" in text
    assert not (tmp_path / "runs").exists()


def test_script_that_raises_at_import_is_not_tried_again(keepstep: Keepstep, tmp_path: Path) -> None:
    done = keepstep("run", "--workers", "2", script(tmp_path, before="import no_such_module"))
    assert done.returncode == 1
    assert "ModuleNotFoundError: No module named 'no_such_module'" in done.stderr
    assert "the script failed before its first step" in done.stderr
    assert done.stderr.count("Traceback") == 1
    assert "src/keepstep" not in done.stderr  # the traceback is the user's


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_script_that_says_what_is_wrong_is_shown_as_it_says_it(
    keepstep: Keepstep, tmp_path: Path, workers: str
) -> None:
    refusing = script(tmp_path, before="sys.exit('no rows in data.csv')")
    text = complaint(keepstep("run", "--workers", workers, refusing), 2)
    assert "no rows in data.csv" in text
    assert len(text.splitlines()) <= 4


def test_words_in_the_middle_of_training_are_a_failure(keepstep: Keepstep, tmp_path: Path) -> None:
    """Also when they are the first that an attempt says which goes on from a checkpoint."""
    leaving = script(tmp_path, body="if run.step == 2: sys.exit('the data server is gone')")
    done = keepstep("run", "--checkpoint-every", "1", "--max-failures", "3", leaving)
    assert done.returncode == 1 and "the data server is gone" in done.stderr
    assert "twice" in done.stderr


def test_loop_that_never_calls_steps(keepstep: Keepstep, tmp_path: Path) -> None:
    text = complaint(keepstep("run", script(tmp_path, loop="train")), 2)
    assert "the loop ended without a step: iterate over run.steps(loader)" in text


def test_optimizer_of_another_model(keepstep: Keepstep, tmp_path: Path) -> None:
    other = "optimizer = torch.optim.SGD(torch.nn.Linear(4, 2).parameters(), lr=0.1)"
    text = complaint(keepstep("run", script(tmp_path, before=other)), 2)
    assert "SGD holds 2 parameter(s) that are in no prepared model" in text


def test_fp16_without_backward(keepstep: Keepstep, tmp_path: Path) -> None:
    text = complaint(keepstep("run", "--precision", "fp16", script(tmp_path)), 2)
    assert "fp16 needs run.backward(loss) in place of loss.backward()" in text
    scaled = script(tmp_path, backward="run.backward(loss)")
    assert keepstep("run", "--precision", "fp16", scaled).returncode == 0


def test_checkpoint_of_another_model(keepstep: Keepstep, tmp_path: Path) -> None:
    stop = "if run.step == 2: sys.exit(3)"
    flags = ("run", "--name", "a", "--checkpoint-every", "1", "--checkpoint-mode", "sync", "--max-failures", "0")
    assert keepstep(*flags, script(tmp_path, body=stop)).returncode == 1
    deeper = (
        "model = torch.nn.Sequential(model, torch.nn.Linear(2, 2));"
        "optimizer.add_param_group({'params': model[1].parameters()})"
    )
    text = complaint(keepstep(*flags, script(tmp_path, before=deeper)), 2)
    assert "is of another model: it lacks 4 of this model's tensors (as 0.bias)" in text
    assert "start this one under another --name" in text
    wider = "model = torch.nn.Linear(4, 1); optimizer = torch.optim.SGD(model.parameters(), lr=0.1)"
    text = complaint(keepstep(*flags, script(tmp_path, before=wider)), 2)
    assert (
        "'model/bias' is (2,) there and (1,) here" in text or "'model/weight' is (2, 4) there and (1, 4) here" in text
    )
    assert keepstep(*flags, script(tmp_path)).returncode == 0  # nothing was lost


@pytest.mark.parametrize("name", ["../escape", "a/b", "/tmp/x", "..", "", "a b", "-x"])
def test_run_name_with_a_path_in_it(keepstep: Keepstep, tmp_path: Path, name: str) -> None:
    text = complaint(keepstep("run", f"--name={name}", script(tmp_path)), 2)
    assert "is not a plain name" in text
    assert list(tmp_path.iterdir()) == [tmp_path / "train.py"]


def test_folder_that_cannot_be_written(keepstep: Keepstep, tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file where the folder should be")
    text = complaint(keepstep("run", script(tmp_path)), 2)
    assert "cannot be written" in text and "--storage" in text


def test_strategy_that_cannot_do_what_a_flag_asks(keepstep: Keepstep, tmp_path: Path) -> None:
    train = script(tmp_path)
    assert "--cpu-offload works with --strategy fsdp, fsdp2 or zero, not ddp" in complaint(
        keepstep("run", "--workers", "2", "--strategy", "ddp", "--cpu-offload", train), 2
    )
    assert "--strategy single runs 1 worker, not 2" in complaint(
        keepstep("run", "--workers", "2", "--strategy", "single", train), 2
    )
    assert "--activation-checkpointing found no repeated blocks in Linear" in complaint(
        keepstep("run", "--activation-checkpointing", train), 2
    )


def test_cuda_where_there_is_none(keepstep: Keepstep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    text = complaint(keepstep("run", "--device", "cuda", script(tmp_path)), 2)
    assert "torch sees no GPU here" in text
    assert not (tmp_path / "runs").exists(), "nothing was started"


def test_deepspeed_file_that_is_not_there(keepstep: Keepstep, tmp_path: Path) -> None:
    flags = ("--strategy", "zero2", "--workers", "2", "--deepspeed-config", "no.json")
    assert "--deepspeed-config no.json cannot be read" in complaint(keepstep("run", *flags, script(tmp_path)), 2)
    assert not (tmp_path / "runs").exists(), "nothing was started"


def test_keep_best_on_a_metric_never_logged(keepstep: Keepstep, tmp_path: Path) -> None:
    text = complaint(keepstep("run", "--name", "a", "--keep-best", "acuracy:max", script(tmp_path)), 2)
    assert "--keep-best names 'acuracy', which no epoch has logged; logged: loss" in text
    done = keepstep("run", "--name", "a", "--keep-best", "loss:min", script(tmp_path))
    assert done.returncode == 0
    assert "goes on from step 6" in done.stderr  # what was trained is not lost


def test_flags_of_the_wrong_kind(keepstep: Keepstep, tmp_path: Path) -> None:
    train = script(tmp_path)
    for words, expected in [
        (("--workers", "0"), "--workers is 0; at least 1 is needed"),
        (("--checkpoint-every", "often"), "give steps, as 500, or a time, as 90s, 10min or 1h"),
        (("--keep", "0"), "at least 1 checkpoint must be kept"),
        (("--keep-best", "accuracy"), "give METRIC:max or METRIC:min"),
        (("--nodes", "2"), "needs --rendezvous HOST:PORT"),
        (("--engine", "inprocess", "--workers", "2"), "--engine inprocess runs 1 worker, not 2"),
    ]:
        assert expected in complaint(keepstep("run", *words, train), 2)


def test_unknown_run_and_recipe(keepstep: Keepstep, tmp_path: Path) -> None:
    assert "there is no run 'nope' in runs; there are: none" in complaint(keepstep("show", "nope"), 2)
    assert "there are gpt, qwen3_tts, resnet_mnist, vit_cifar10" in complaint(keepstep("new", "vit"), 2)


def test_the_same_error_at_the_same_step_twice_stops(keepstep: Keepstep, tmp_path: Path) -> None:
    broken = "if run.step == 3: raise ValueError(f'bad sample {run.rank}')"
    done = keepstep("run", "--workers", "2", "--max-failures", "9", script(tmp_path, body=broken))
    assert done.returncode == 1
    assert "the same error at the same step (3) twice: not retrying; giving up" in done.stderr
    assert done.stderr.count("ValueError: bad sample") >= 2


def test_full_disk(keepstep: Keepstep, tmp_path: Path) -> None:
    """The disk is full from the second checkpoint on: the first is kept, and the run goes on once there is room."""
    fill = tmp_path / "full.py"
    fill.write_text(
        "import errno, os\n"
        "from pathlib import Path\n"
        "from keepstep.checkpoint import dcp\n"
        "write = dcp.write_safetensors\n"
        "def limited(path, tensors, metadata):\n"
        "    if 'step_00000001' not in str(path) and not Path('room').exists():\n"
        "        path.write_bytes(b'half')\n"
        "        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))\n"
        "    return write(path, tensors, metadata)\n"
        "dcp.write_safetensors = limited\n"
    )
    train = script(tmp_path, before="import full")
    text = complaint(keepstep("run", "--name", "a", "--checkpoint-every", "1", train), 2)
    assert "No space left on device" in text
    assert "the newest good one is step 1; make room, or lower --keep, and start the same command again" in text
    (tmp_path / "room").touch()
    done = keepstep("run", "--name", "a", "--checkpoint-every", "1", train)
    assert done.returncode == 0
    assert "goes on from step 1" in done.stderr
