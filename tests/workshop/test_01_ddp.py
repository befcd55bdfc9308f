"""Lesson 01: DDP by hand, its launcher, and the same in keepstep."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from workshop.conftest import WORKSHOP, Runner, pictures, text

sys.path.insert(0, str(WORKSHOP))
from common.checks import Wrong, load
from common.count import count
from common.record import read, read_run

LESSON = "01-ddp-pytorch-only"
SMALL = ("--epochs", 2, "--limit", 230, "--batch-size", 50)  # the last batch is smaller, and divided, too
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
KEEPSTEP = (sys.executable, "-m", "keepstep", "run", "--workers", "2", "--name", "keepstep")
FAKE_SSH = """#!/bin/bash
# In place of ssh: notes the host, and runs the command here.
while [[ $1 == -* ]]; do shift 2; done
echo "$1" >> "$SSH_LOG"
shift
exec bash -c "$*"
"""

IN_A_HURRY = """
# Ends train_ddp.py again and again while gloo's threads, on the one core that they share with it, come last of all.
import os, socket, sys, time
from pathlib import Path
import train_ddp

begin = train_ddp.dist.init_process_group

def begin_with_slow_threads(*words, **named):
    begin(*words, **named)
    for _ in range(100):  # they take their name once they run
        threads = [path for path in Path("/proc/self/task").iterdir() if "gloo_runloop" in (path / "comm").read_text()]
        if threads:
            break
        time.sleep(0.1)
    assert threads, "gloo's threads have another name now"
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    for thread in threads:
        os.sched_setaffinity(int(thread.name), os.sched_getaffinity(0))
        os.sched_setscheduler(int(thread.name), os.SCHED_IDLE, os.sched_param(0))

train_ddp.dist.init_process_group = begin_with_slow_threads
is_worker, codes = False, []
for _ in range(12):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1",
                       "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    worker = os.fork()
    if is_worker := worker == 0:
        break
    codes.append(os.waitpid(worker, 0)[1])
if is_worker:
    train_ddp.main()  # and then Python ends, as it does after the script
else:
    print(codes)
"""


def same(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> None:
    assert len(one) == len(other) == 2
    for left, right in zip(one, other, strict=True):
        for name in ("train_loss", "test_loss", "accuracy"):
            assert left[name] == pytest.approx(right[name], rel=1e-5), (name, left, right)


def done_well(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def single(run_lesson: Runner, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What one process records; ViT, so that two workers must record the same."""
    output = tmp_path_factory.mktemp("single")
    done_well(run_lesson(LESSON, "train_single_machine.py", *SMALL, "--output", output))
    return read(output)


def test_losses_are_the_same_in_keepstep(run_lesson: Runner, tmp_path: Path) -> None:
    """ResNet-18, whose batch norm tells which samples meet on a worker; the notebook's test has ViT."""
    settings = (*SMALL, "--task", "resnet")
    by_hand = run_lesson(LESSON, "train_ddp.py", *settings, "--output", tmp_path / "ddp", launcher=TORCHRUN)
    assert "accuracy" in done_well(by_hand)
    assert (tmp_path / "ddp" / "model.pt").is_file()
    launcher = (*KEEPSTEP, "--storage", str(tmp_path))
    done_well(run_lesson(LESSON, "train_keepstep.py", *settings, "--order", "torch", launcher=launcher))
    same(read(tmp_path / "ddp"), read_run(tmp_path / "keepstep", num_samples=230, batch_size=50))


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="threads can be made to come last on Linux only")
def test_a_worker_that_has_done_its_work_ends_well(run_lesson: Runner, tmp_path: Path) -> None:
    """If it waits for Python to be taken down, a third of them abort."""
    (tmp_path / "in_a_hurry.py").write_text(IN_A_HURRY)
    small = ("--epochs", 1, "--limit", 8, "--batch-size", 4, "--output", tmp_path / "out")
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(WORKSHOP / LESSON)}
    done = run_lesson(LESSON, tmp_path / "in_a_hurry.py", *small, **environment)
    assert done.stdout.splitlines()[-1] == str([0] * 12), done.stderr


def test_the_steps_are_counted() -> None:
    single, by_hand, keepstep = (
        count(WORKSHOP / LESSON / name, WORKSHOP / LESSON / "train_single_machine.py")
        for name in ("train_single_machine.py", "train_ddp.py", "train_keepstep.py")
    )
    assert (single.steps, by_hand.steps, keepstep.steps) == (0, 9, 4)
    assert keepstep.boilerplate < by_hand.boilerplate / 4
    assert keepstep.total <= single.total


def test_bad_input_says_what_to_do(run_lesson: Runner, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused = run_lesson(LESSON, "train_ddp.py", "--world-size", 2, "--master-port", port)
    assert refused.returncode == 1
    assert f"port {port} cannot be used" in refused.stderr
    assert "give another --master-port" in refused.stderr
    uneven = run_lesson(LESSON, "train_ddp.py", "--world-size", 3, "--batch-size", 50)
    assert uneven.returncode == 2
    assert "50 does not divide between 3 workers" in uneven.stderr


def test_missing_data_is_named(run_lesson: Runner, tmp_path: Path) -> None:
    missing = run_lesson(LESSON, "train_single_machine.py", "--data", tmp_path)
    assert missing.returncode == 1
    assert str(tmp_path) in missing.stderr
    assert "Name the folder that holds them" in missing.stderr


# -- launch_multinode_ddp.sh -------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def launch_words(*words: Any) -> tuple[str, ...]:
    return ("./launch_multinode_ddp.sh", "--python", sys.executable, "--master-port", *map(str, words))


def test_two_nodes_on_this_machine(run_lesson: Runner, single: list[dict[str, Any]], tmp_path: Path) -> None:
    output = tmp_path / "two nodes"  # blanks must survive the way
    launcher = launch_words(free_port(), "--local", "--", *SMALL, "--output", output)
    printed = done_well(run_lesson(LESSON, launcher=launcher))
    assert "[local-0] epoch 1" in printed
    same(single, read(output))


def test_hosts_are_launched_by_ssh(run_lesson: Runner, tmp_path: Path) -> None:
    """Stands in for ssh: a program of that name that runs here what it was told to run there."""
    fake = tmp_path / "bin" / "ssh"
    fake.parent.mkdir()
    fake.write_text(FAKE_SSH)
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    hosts = ("--hosts", "node1,me@node2", "--master-addr", "127.0.0.1", "--nproc-per-node", 1)
    launcher = launch_words(free_port(), *hosts, "--", *SMALL, "--output", tmp_path / "out")
    path = f"{fake.parent}{os.pathsep}{os.environ['PATH']}"
    printed = done_well(run_lesson(LESSON, launcher=launcher, PATH=path, SSH_LOG=str(tmp_path / "hosts")))
    assert "[node1] ViT on CIFAR-10: small model, first 230 images, 2 x CPU" in printed
    # Each is looked at, then the port of the first, and then both are started.
    assert sorted((tmp_path / "hosts").read_text().split()) == ["me@node2"] * 2 + ["node1"] * 3
    assert len(read(tmp_path / "out")) == 2


def test_a_node_that_fails_ends_all(run_lesson: Runner, tmp_path: Path) -> None:
    launcher = launch_words(free_port(), "--local", "--", "--data", tmp_path, "--output", tmp_path / "out")
    failed = run_lesson(LESSON, launcher=launcher, timeout=100)
    assert failed.returncode == 1
    assert "failed (exit code 1); stopping the others" in failed.stderr
    assert "Name the folder that holds them" in failed.stdout


def workers_of(output: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if str(output) in " ".join(process.info["cmdline"] or ()) and "train_ddp.py" in process.info["cmdline"]:
            found.append(process)
    return found


@pytest.mark.parametrize("by", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_its_end_is_theirs(data: str, tmp_path: Path, by: signal.Signals) -> None:
    output = tmp_path / "out"
    words = launch_words(free_port(), "--local", "--", "--epochs", 1000, "--limit", 256, "--output", output)
    environment = os.environ | {"KEEPSTEP_DATA": data}
    launcher = subprocess.Popen(
        words,
        cwd=WORKSHOP / LESSON,
        env=environment,
        stdout=subprocess.DEVNULL,
        # Tests that a shell runs in the background hand down that it is ignored, and a script cannot undo that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        until(lambda: (output / "metrics.jsonl").exists(), "training began")
        launcher.send_signal(by)
        assert launcher.wait(40) == (130 if by is signal.SIGINT else -signal.SIGKILL)
        until(lambda: not workers_of(output), "all workers ended")
    finally:
        for process in workers_of(output):
            process.kill()


def until(condition: Any, what: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((29500,), "name the machines with --hosts node1,node2, or try it here with --local"),
        ((29500, "--local", "--hosts", "a,b"), "exclude each other"),
        ((29500, "--local", "--nproc-per-node", "two"), "--nproc-per-node is 'two'"),
        (("http", "--local"), "--master-port is 'http'"),
        ((29500, "--local", "--epochs", 3), "unknown option --epochs; what train_ddp.py is to get stands after --"),
        ((29500, "--hosts"), "--hosts needs a value"),
        ((29500, "--hosts", "a,,b"), "has an empty or odd name"),
        ((29500, "--local", "--dir", "/nowhere"), "local-0 has no /nowhere/train_ddp.py"),
    ],
)
def test_the_launcher_says_what_is_wrong(run_lesson: Runner, words: tuple[Any, ...], said: str) -> None:
    refused = run_lesson(LESSON, launcher=launch_words(*words))
    assert refused.returncode == 2
    assert said in refused.stderr


def test_the_launcher_looks_whether_the_port_is_free(run_lesson: Runner) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        refused = run_lesson(LESSON, launcher=launch_words(port, "--local"))
    assert refused.returncode == 2
    assert f"port {port} of local-0 is taken" in refused.stderr


def test_the_notebook(run_notebook: Any) -> None:
    notebook = run_notebook(LESSON, "DDP_By_Hand.ipynb")
    assert len(pictures(notebook)) == 3
    assert all(len(picture) > 5000 for picture in pictures(notebook))
    said = text(notebook)
    away = {
        name: float(value) for name, value in re.findall(r"^(averaged|DDP|.* alone|uneven, \w+) +(\S+)$", said, re.M)
    }
    assert len(away) == 6
    for name in ("averaged", "DDP", "uneven, weighted"):
        assert away[name] < 1e-5
    for name in ("rank 0 alone", "rank 1 alone", "uneven, averaged"):
        assert away[name] > 0.01
    table = said.partition("largest relative difference from one process:")[2]
    for name in ("torchrun", "mp.spawn", "keepstep"):
        assert max(map(float, re.search(rf"^{name} +(.*)$", table, re.M)[1].split())) < 1e-5
    assert float(re.search(r"with batch norm: (\S+) apart", said)[1]) > 1e-4


# -- exercises: wrong answers, beside those that learners begin with ---------------------------------------------------


@pytest.mark.parametrize(
    ("share", "hint"),
    [
        (lambda n, rank, size: range(rank * (n // size), (rank + 1) * (n // size)), "only 9 are in a share"),
        (lambda n, rank, size: range(n) if rank == 0 else range(0), "some workers would wait for others"),
        (lambda n, rank, size: range(n), "would be counted twice"),
    ],
    ids=["the rest is left out", "one has all", "all have all"],
)
def test_wrong_divisions_are_found(share: Any, hint: str) -> None:
    checks = load(WORKSHOP / LESSON / "exercises" / "checks.py")
    with pytest.raises(Wrong, match=hint):
        checks.check_2(SimpleNamespace(share=share))


@pytest.mark.parametrize(
    ("orders", "hint"),
    [
        (lambda n, epochs, rank, size, seed: [random.sample(range(n), n // size) for _ in range(epochs)], "see each"),
        (lambda n, epochs, rank, size, seed: [[*range(rank, n, size)]] * epochs, "has the order of the first"),
        (
            lambda n, epochs, rank, size, seed: [
                random.Random(e).sample(range(n), n)[rank::size] for e in range(epochs)
            ],
            "another seed gives the same order",
        ),
    ],
    ids=["each draws by itself", "no shuffling", "the seed is forgotten"],
)
def test_wrong_orders_are_found(orders: Any, hint: str) -> None:
    checks = load(WORKSHOP / LESSON / "exercises" / "checks.py")
    with pytest.raises(Wrong, match=hint):
        checks.check_3(SimpleNamespace(orders=orders))
