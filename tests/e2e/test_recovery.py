"""Workers that died are replaced by standbys: the same results, the phases on record, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from e2e.conftest import Shell
from keepstep.folder import RunFolder
from keepstep.observe.recovery import PHASES

SCRIPT = """
import os, sys, time, torch, keepstep
import rich.table
from pathlib import Path
from torch.utils.data import DataLoader, TensorDataset

here = Path(__file__).parent
run = keepstep.start()
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.AdamW(model.parameters())
loader = DataLoader(TensorDataset(torch.randn(800, 4)), batch_size=4, shuffle=True)
model, optimizer, loader = run.prepare(model, optimizer, loader)
made_of = Path("/proc/self/cmdline").read_text().split(chr(0))[2]
with (here / f"born_{run.rank}").open("a") as file:
    file.write(f"{made_of.split()[1]}\\n")
for (x,) in run.steps(loader):
    loss = model(x + torch.randn_like(x)).pow(2).mean()
    loss.backward(); optimizer.step(); optimizer.zero_grad()
    run.log(loss=loss)
    (here / f"process_{run.rank}").write_text(str(os.getpid()))
    while run.step >= 20 and not (here / "go").exists():
        time.sleep(0.02)
    if run.step == 100 and (here / "fail").exists():
        raise ValueError("as planned")
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def belonging_to(mark: Path) -> list[psutil.Process]:
    """Every process that was started with this in its environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("OF_TEST") == str(mark) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def standbys_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Those that have imported everything, and wait."""
    children = psutil.Process(process.pid).children()
    return [child for child in children if "keepstep.standby" in child.cmdline()[-1] and _waits(child)]


def _waits(process: psutil.Process) -> bool:
    before = process.cpu_times().user
    time.sleep(0.5)
    return bool(process.cpu_times().user == before > 1.0)


def until(condition: Callable[[], object], timeout_s: float = 120) -> None:
    limit = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < limit, "it did not come about"
        time.sleep(0.05)


@pytest.fixture
def started(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A run of two workers in whose step 21 both wait, with a standby for each."""
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ["run", "--workers", "2", "--device", "cpu", "--name", "a", "--checkpoint-every", "10", "train.py"]
    process = subprocess.Popen(
        [str(Path(sys.executable).with_name("keepstep")), *words],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OF_TEST": str(tmp_path)},
    )
    try:
        until(lambda: len(standbys_of(process)) == 2)
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def kill(tmp_path: Path, rank: int) -> None:
    os.kill(int((tmp_path / f"process_{rank}").read_text()), signal.SIGKILL)


def test_standbys_take_over_and_nothing_changes(started: subprocess.Popen[str], tmp_path: Path, shell: Shell) -> None:
    standbys = {standby.pid for standby in standbys_of(started)}
    kill(tmp_path, 1)
    until(lambda: len((tmp_path / "born_0").read_text().split()) == 2)
    (tmp_path / "go").touch()
    _, text = started.communicate(timeout=120)
    assert started.returncode == 0, text
    for rank in (0, 1):
        assert (tmp_path / f"born_{rank}").read_text().split() == ["keepstep.worker", "keepstep.standby"]
    assert {int((tmp_path / f"process_{rank}").read_text()) for rank in (0, 1)} == standbys
    folder = RunFolder(tmp_path / "runs", "a")
    (event,) = [event for event in folder.read_events() if event["event"] == "recovered"]
    assert event["step"] == 21
    assert list(event["seconds"]) == list(PHASES)
    assert event["total"] == pytest.approx(sum(event["seconds"].values()), abs=0.01)
    assert event["seconds"]["import"] < 1.0  # torch alone takes longer
    shown = shell("keepstep", "show", "a").stdout
    assert f"recovered in {event['total']:.1f} s: detect {event['seconds']['detect']:.2f}, tear_down" in shown
    done = shell("keepstep", "run", "--workers", "2", "--device", "cpu", "--name", "calm", "train.py")
    assert done.returncode == 0, done.stderr
    assert folder.read_metrics() == RunFolder(tmp_path / "runs", "calm").read_metrics()
    assert belonging_to(tmp_path) == []


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        pytest.param("finished", 0, marks=pytest.mark.slow),
        pytest.param("failed", 1, marks=pytest.mark.slow),
        (signal.SIGTERM, 75),
        (signal.SIGKILL, -signal.SIGKILL),
    ],
)
def test_nothing_is_left_behind(
    started: subprocess.Popen[str], tmp_path: Path, ending: str | signal.Signals, code: int
) -> None:
    assert len(belonging_to(tmp_path)) >= 5
    if ending == "failed":
        (tmp_path / "fail").touch()
    if isinstance(ending, signal.Signals):
        started.send_signal(ending)
    if ending != signal.SIGKILL:
        (tmp_path / "go").touch()
    started.communicate(timeout=120)
    assert started.returncode == code
    until(lambda: not belonging_to(tmp_path), 0.2 if ending != signal.SIGKILL else 5)


def test_a_standby_that_died_is_done_without(started: subprocess.Popen[str], tmp_path: Path) -> None:
    for standby in standbys_of(started):
        standby.kill()
    kill(tmp_path, 0)
    until(lambda: len((tmp_path / "born_0").read_text().split()) == 2)
    (tmp_path / "go").touch()
    _, text = started.communicate(timeout=120)
    assert started.returncode == 0, text
    failed = [event for event in RunFolder(tmp_path / "runs", "a").read_events() if event["event"] == "failed"]
    assert len(failed) == 1
