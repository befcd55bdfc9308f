"""The commands and the ways to start a script, as a person uses them."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from e2e.conftest import Shell
from keepstep.folder import RunFolder

README = Path(__file__).parents[2] / "README.md"


def readme_script() -> str:
    block = re.search(r"<!-- test:.*?-->\n```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert block is not None
    return block[1]


@pytest.fixture
def train(tmp_path: Path) -> Path:
    """The script that the README shows, as it stands."""
    path = tmp_path / "train.py"
    path.write_text(readme_script())
    return path


SLOW = """
import time, torch, keepstep
from torch.utils.data import DataLoader, TensorDataset
run = keepstep.start()
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.Adam(model.parameters())
train = DataLoader(TensorDataset(torch.randn(400, 4), torch.randn(400, 2)), batch_size=4, shuffle=True)
model, optimizer, train = run.prepare(model, optimizer, train)
for epoch in run.epochs(2):
    for x, y in run.steps(train):
        loss = ((model(x) - y) ** 2).mean()
        loss.backward()
        optimizer.step(); optimizer.zero_grad()
        run.log(loss=loss)
        time.sleep(0.02)
"""


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    path = tmp_path / "slow.py"
    path.write_text(SLOW)
    return path


def only_run(storage: Path) -> RunFolder:
    (path,) = storage.iterdir()
    return RunFolder(storage, path.name)


def losses(storage: Path, name: str) -> list[float]:
    return [line["loss"] for line in RunFolder(storage, name).read_metrics() if "loss" in line]


def test_the_readme_script_runs_in_every_way(shell: Shell, train: Path, tmp_path: Path) -> None:
    plain = shell("python", "train.py")
    assert plain.returncode == 0, plain.stderr
    assert re.search(r"epoch 3: accuracy (9\d|100)\.\d%", plain.stdout)
    alone = [line["loss"] for line in only_run(tmp_path / "runs").read_metrics() if "loss" in line]
    assert len(alone) == 52

    assert shell("keepstep", "run", "--name", "in-process", "train.py").returncode == 0
    assert losses(tmp_path / "runs", "in-process") == alone

    done = shell("torchrun", "--standalone", "--nproc_per_node=2", "train.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("epoch 3: accuracy") == 1  # rank 0 only

    assert (
        shell("keepstep", "run", "--workers", "2", "--strategy", "fsdp2", "--name", "two", "train.py").returncode == 0
    )
    assert losses(tmp_path / "runs", "two") == pytest.approx(alone, rel=1e-4)


def test_users_own_torchrun_restarts_and_resumes(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        readme_script()
        .replace("keepstep.start()", 'keepstep.start(checkpoint_every="10")')
        .replace(
            "        run.log(loss=loss)",
            "        run.log(loss=loss)\n"
            "        import os, pathlib\n"
            "        if run.step == 27 and run.rank == 1 and not pathlib.Path('died').exists():\n"
            "            pathlib.Path('died').touch(); os.kill(os.getpid(), 9)",
        )
    )
    done = shell("torchrun", "--standalone", "--nproc_per_node=2", "--max-restarts=2", "train.py")
    assert done.returncode == 0, done.stderr
    folder = only_run(tmp_path / "runs")
    resumed = [event["step"] for event in folder.read_events() if event["event"] == "resumed"]
    assert resumed in ([10], [20])
    assert [line["step"] for line in folder.read_metrics() if "loss" in line] == list(range(1, 53))


def test_runs_show_export(shell: Shell, train: Path, tmp_path: Path) -> None:
    assert "no runs in runs" in shell("keepstep", "runs").stdout
    flags = ("--workers", "2", "--strategy", "fsdp2", "--name", "first", "--keep-best", "accuracy:max")
    assert shell("keepstep", "run", *flags, "train.py").returncode == 0
    runs = shell("keepstep", "runs").stdout
    assert re.search(r"first\s+finished\s+52\s+2 fsdp2\s+loss", runs)
    show = shell("keepstep", "show", "first").stdout
    for expected in ("finished at step 52", "strategy=fsdp2", "where the time went", "keep_best=accuracy:max"):
        assert expected in show
    exported = shell("keepstep", "export", "first", "--output", "weights.safetensors")
    assert exported.stdout == "weights.safetensors: 4 tensors of step 52\n"
    model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
    model.load_state_dict(load_file(tmp_path / "weights.safetensors"), strict=True)
    x = torch.randn(2000, 20, generator=torch.Generator().manual_seed(1))
    assert ((model(x).argmax(1) == (x.sum(1) > 0)).float().mean()) > 0.9
    assert shell("keepstep", "export", "first", "--checkpoint", "best").returncode == 0
    again = shell("keepstep", "run", *flags, "train.py")
    assert again.returncode == 0
    assert "run 'first' finished at step 52: nothing to do" in again.stderr
    otherwise = shell("keepstep", "run", *flags, "train.py", "--epochs", "9")
    assert otherwise.returncode == 2  # not to be taken for a run of nine epochs
    assert "finished at step 52, given []; it is given [--epochs 9] now" in otherwise.stderr


def test_new_doctor_version(shell: Shell, tmp_path: Path) -> None:
    assert "next: cd mine && keepstep run train.py" in shell("keepstep", "new", "gpt", "mine").stdout
    assert sorted(path.name for path in (tmp_path / "mine").iterdir()) == [
        "README.md",
        "data.py",
        "model.py",
        "train.py",
    ]
    assert "not empty" in shell("keepstep", "new", "gpt", "mine").stderr
    doctor = shell("keepstep", "doctor")
    assert doctor.returncode == 0 and f"torch {torch.__version__}" in doctor.stdout
    assert shell("keepstep", "--version").stdout.startswith("keepstep 0.")


@pytest.mark.parametrize(
    ("workers", "number"),
    [
        ("1", signal.SIGTERM),
        ("2", signal.SIGTERM),
        pytest.param("1", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("2", signal.SIGINT, marks=pytest.mark.slow),
    ],
)
def test_a_request_to_stop_saves_and_the_same_command_goes_on(
    slow: Path, tmp_path: Path, number: signal.Signals, workers: str, shell: Shell
) -> None:
    """To all processes at once, as Ctrl-C and `timeout` do: loader processes must live on until the step is saved."""
    slow.write_text(SLOW.replace("shuffle=True)", "shuffle=True, num_workers=2)"))
    words = ["run", "--workers", workers, "--name", "a", "slow.py"]
    command = [str(Path(sys.executable).with_name("keepstep")), *words]
    process = subprocess.Popen(
        command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, env=dict(os.environ), start_new_session=True
    )
    metrics = tmp_path / "runs" / "a" / "metrics.jsonl"
    deadline = time.time() + 60
    while time.time() < deadline and not (metrics.exists() and metrics.stat().st_size):
        time.sleep(0.05)
    os.killpg(process.pid, number)
    _, text = process.communicate(timeout=60)
    assert process.returncode == 75, text
    assert text.count("asked to stop") == 1
    found = re.search(r"stopped on request, saved at step (\d+)", text)
    assert found is not None
    assert "Traceback" not in text
    assert 0 < int(found[1]) < 200
    done = shell("keepstep", *words)
    assert done.returncode == 0, done.stderr
    assert f"goes on from step {found[1]}" in done.stderr
    assert [line["step"] for line in RunFolder(tmp_path / "runs", "a").read_metrics()] == list(range(1, 201))


def test_a_second_run_under_the_same_name_is_refused(slow: Path, tmp_path: Path, shell: Shell) -> None:
    command = [str(Path(sys.executable).with_name("keepstep")), "run", "--name", "a", "slow.py"]
    first = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, env=dict(os.environ))
    lock = tmp_path / "runs" / "a" / ".lock"
    deadline = time.time() + 60
    while time.time() < deadline and not (lock.exists() and lock.stat().st_size):
        time.sleep(0.05)
    second = shell("keepstep", "run", "--name", "a", "slow.py")
    first.kill()
    first.wait()
    first.stderr.close()  # type: ignore[union-attr]
    assert second.returncode == 2
    assert f"run 'a' is running already, in process {first.pid} on" in second.stderr


def test_workers_die_with_a_supervisor_that_is_killed(slow: Path, tmp_path: Path, shell: Shell) -> None:
    import psutil

    words = ["run", "--workers", "2", "--checkpoint-every", "10", "--name", "a", "slow.py"]
    command = [str(Path(sys.executable).with_name("keepstep")), *words]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL, env=dict(os.environ))
    checkpoints = tmp_path / "runs" / "a" / "checkpoints"
    deadline = time.time() + 60
    while time.time() < deadline and not list(checkpoints.glob("step_*")):
        time.sleep(0.05)
    workers = psutil.Process(process.pid).children(recursive=True)
    assert len(workers) >= 2
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(workers, timeout=10)
    assert alive == []
    assert shell("keepstep", *words).returncode == 0
    assert [line["step"] for line in RunFolder(tmp_path / "runs", "a").read_metrics()] == list(range(1, 201))


def test_launch_from_a_script(shell: Shell, tmp_path: Path) -> None:
    body = "\n    ".join(readme_script().replace("import keepstep\n", "").splitlines())
    (tmp_path / "notebook.py").write_text(
        "import keepstep\n"
        f"def train():\n    {body}\n"
        "if __name__ == '__main__':\n"
        "    one = keepstep.launch(train, name='one')\n"
        "    two = keepstep.launch(train, workers=2, name='two')\n"
        "    print(one.step, two.step, one.outcome.value, two.metrics['accuracy'] > 0.8)\n"
        "    try:\n"
        "        keepstep.launch(lambda: 1 / 0, workers=2, name='three')\n"
        "    except keepstep.KeepstepError as error:\n"
        "        print('failed:', str(error).splitlines()[0])\n"
    )
    done = shell("python", "notebook.py")
    assert done.returncode == 0, done.stderr
    assert "52 52 finished True" in done.stdout
    assert "failed: rank" in done.stdout and "ZeroDivisionError: division by zero" in done.stdout


def test_module_and_function(shell: Shell, train: Path, tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    body = "\n    ".join(readme_script().splitlines())
    (tmp_path / "package" / "job.py").write_text(f"def main():\n    {body}\n")
    assert shell("keepstep", "run", "--name", "f", "package.job:main").returncode == 0
    missing = shell("keepstep", "run", "package.job:train")
    assert missing.returncode == 2 and "has no function 'train'" in missing.stderr


def test_two_nodes_on_this_machine(train: Path, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = ["--nodes", "2", "--workers", "2", "--rendezvous", f"127.0.0.1:{port}", "--name", "a", "--strategy", "ddp"]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    nodes = [
        subprocess.Popen(
            [str(Path(sys.executable).with_name("keepstep")), "run", *flags, "--node-rank", str(rank), "train.py"],
            cwd=tmp_path,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    texts = [node.communicate(timeout=120)[1] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], texts
    folder = RunFolder(tmp_path / "runs", "a")
    assert folder.read_result()["status"] == "finished"
    assert sorted(path.name for path in folder.logs.iterdir()) == ["rank_0.txt", "rank_1.txt"]
    assert [line["step"] for line in folder.read_metrics() if "loss" in line] == list(range(1, 53))


def test_damaged_checkpoints_are_named_and_passed_over(shell: Shell, slow: Path, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        SLOW.replace("time.sleep(0.02)", "assert run.step != 55 or run.path.joinpath('go').exists()")
    )
    flags = (
        "run",
        "--name",
        "a",
        "--checkpoint-every",
        "10",
        "--checkpoint-mode",
        "sync",
        "--max-failures",
        "0",
        "slow.py",
    )
    assert shell("keepstep", *flags).returncode == 1
    checkpoints = tmp_path / "runs" / "a" / "checkpoints"
    newest = checkpoints / "step_00000050" / "rank_00000.safetensors"
    content = bytearray(newest.read_bytes())
    content[-3] ^= 1
    newest.write_bytes(bytes(content))
    os.truncate(checkpoints / "step_00000040" / "state.json", 10)
    (tmp_path / "runs" / "a" / "go").touch()
    done = shell("keepstep", *flags)
    assert done.returncode == 0, done.stderr
    assert "step_00000050/rank_00000.safetensors is damaged: its checksum differs" in done.stderr
    assert "step_00000040/state.json has 10 bytes" in done.stderr
    assert "goes on from step 30" in done.stderr
    metrics = RunFolder(tmp_path / "runs", "a").read_metrics()
    assert [line["step"] for line in metrics] == list(range(1, 201))


def test_result_says_where_the_time_went(shell: Shell, slow: Path, tmp_path: Path) -> None:
    began = time.time()
    assert shell("keepstep", "run", "--workers", "2", "--name", "a", "slow.py").returncode == 0
    wall = time.time() - began
    result = json.loads((tmp_path / "runs" / "a" / "result.json").read_text())
    assert result["seconds"]["step"] == pytest.approx(200 * 0.02, rel=0.5)
    assert sum(result["seconds"].values()) <= wall


def test_a_finished_run_does_nothing_under_the_users_torchrun(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(readme_script().replace("keepstep.start()", 'keepstep.start(name="a")'))
    command = ("torchrun", "--standalone", "--nproc_per_node=2", "train.py")
    assert shell(*command).returncode == 0
    again = shell(*command)
    assert again.returncode == 0, again.stderr
    assert "run 'a' finished at step 52" in again.stdout
    assert "epoch 0" not in again.stdout


def test_a_script_that_leaves_with_an_error_has_not_finished(shell: Shell, tmp_path: Path) -> None:
    leave = "import sys; sys.exit(3) if run.step == 30 and not run.path.joinpath('go').exists() else None"
    start = 'keepstep.start(name="a", checkpoint_every="10")'
    (tmp_path / "slow.py").write_text(SLOW.replace("time.sleep(0.02)", leave).replace("keepstep.start()", start))
    assert shell("python", "slow.py").returncode == 3
    folder = RunFolder(tmp_path / "runs", "a")
    assert not folder.finished
    (folder.path / "go").touch()
    done = shell("python", "slow.py")
    assert done.returncode == 0, done.stderr
    assert "goes on from step" in done.stderr
    assert [line["step"] for line in folder.read_metrics()] == list(range(1, 201))


def test_a_request_to_stop_while_workers_start_is_not_lost(slow: Path, tmp_path: Path) -> None:
    slow.write_text("import time; time.sleep(2)\n" + SLOW)
    command = [str(Path(sys.executable).with_name("keepstep")), "run", "--workers", "2", "--name", "a", "slow.py"]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, env=dict(os.environ))
    log = tmp_path / "runs" / "a" / "logs" / "rank_0.txt"
    deadline = time.time() + 60
    while time.time() < deadline and not log.exists():
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, text = process.communicate(timeout=60)
    assert process.returncode == 75, text


def test_sharded_weights_and_two_optimizers(shell: Shell, tmp_path: Path) -> None:
    """run.save of shards is collective; two optimizers may share a model."""
    changes = {
        "time.sleep(0.02)": "second.step(); second.zero_grad()",
        "torch.optim.Adam(model.parameters())": "torch.optim.Adam([model.weight])",
        "model, optimizer, train = run.prepare(model, optimizer, train)": (
            "second = torch.optim.SGD([model.bias], lr=0.1)\n"
            "model, optimizer, second, train = run.prepare(model, optimizer, second, train)"
        ),
    }
    body = SLOW
    for old, new in changes.items():
        body = body.replace(old, new)
    (tmp_path / "train.py").write_text(body + "run.save('w.safetensors', model.state_dict())\n")
    for strategy in ("ddp", "fsdp2"):
        done = shell("keepstep", "run", "--workers", "2", "--strategy", strategy, "--name", strategy, "train.py")
        assert done.returncode == 0, done.stderr
        saved = load_file(tmp_path / "runs" / strategy / "artifacts" / "w.safetensors")
        assert {name: tuple(tensor.shape) for name, tensor in saved.items()} == {"weight": (2, 4), "bias": (2,)}
    assert losses(tmp_path / "runs", "ddp") == losses(tmp_path / "runs", "fsdp2")
