"""A standby becomes the very worker that a fresh start makes, dies with its supervisor, and is replaced if it dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from keepstep.engines.standby import Standby, Standbys
from keepstep.job import LOGS, SUPERVISOR, TARGET, Target
from keepstep.standby import WORKER

TELL = """
import json, os, pathlib, sys
tell = {
    "environment": dict(os.environ), "folder": os.getcwd(), "arguments": sys.argv, "path": sys.path,
    "stdin": os.readlink("/proc/self/fd/0"), "session": os.getsid(0) == os.getpid(),
    "policies": sorted({os.sched_getscheduler(int(t)) for t in os.listdir("/proc/self/task")}),
    "nice": os.nice(0), "name": __name__, "by": open("/proc/self/cmdline").read().split(chr(0))[2],
}
pathlib.Path(sys.argv[1]).write_text(json.dumps(tell))
print("hello")
"""


def environment(tmp_path: Path, out: str = "out", **further: str) -> dict[str, str]:
    script = tmp_path / "train.py"
    script.write_text(TELL)
    ours = {
        SUPERVISOR: str(os.getpid()),
        TARGET: Target(str(script), (str(tmp_path / out), "--lr")).to_json(),
        LOGS: str(tmp_path),
        "RANK": "0",
    }
    return {**os.environ, **ours, **further}


@pytest.fixture
def standby(tmp_path: Path) -> Iterator[Callable[..., Standby]]:
    made: list[Standby] = []

    def make(*arguments: Any, **options: Any) -> Standby:
        made.append(Standby(*arguments, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def until(condition: Callable[[], bool], timeout_s: float = 60) -> None:
    limit = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < limit, "it did not come about"
        time.sleep(0.02)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("waits", [True, False], ids=["ready", "told at once"])
def test_a_worker_from_a_standby_is_as_one_that_was_started_afresh(
    tmp_path: Path, standby: Callable[..., Standby], waits: bool
) -> None:
    wanted = environment(tmp_path, MASTER_PORT="2", NEW="x" * 100_000)
    early = environment(tmp_path, MASTER_PORT="1", OLD="1")
    imported = standby(early, json.dumps(["rich", "no_such_module", "rich.table"]))
    if waits:
        until(lambda: imported.is_ready)
    assert imported.become(wanted)
    assert imported.process.wait(60) == 0
    found = json.loads((tmp_path / "out").read_text())
    subprocess.run([sys.executable, "-c", WORKER], env=wanted, start_new_session=True, check=True)
    fresh = json.loads((tmp_path / "out").read_text())
    assert "keepstep.standby" in found.pop("by") and "keepstep.standby" not in fresh.pop("by")
    assert found == fresh
    assert (tmp_path / "rank_0.txt").read_text() == "hello\nhello\n"


def test_it_leaves_when_it_is_not_needed(tmp_path: Path, standby: Callable[..., Standby]) -> None:
    one = standby(environment(tmp_path))
    one._line.close()
    assert one.process.wait(60) == 0
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it goes when its line is closed")
@pytest.mark.parametrize("ready", [False, True], ids=["while it imports", "while it waits"])
def test_it_dies_with_who_started_it(tmp_path: Path, ready: bool) -> None:
    program = f"""
import json, os, sys, time
from keepstep.engines.standby import Standby
environment = json.loads(sys.argv[1])
environment["{SUPERVISOR}"] = str(os.getpid())
one = Standby(environment)
while {ready} and not one.is_ready:
    time.sleep(0.02)
print(one.process.pid, flush=True)
time.sleep(100)
"""
    words = [sys.executable, "-c", program, json.dumps(environment(tmp_path))]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        one = psutil.Process(int(parent.stdout.readline()))
        assert one.is_running()
        until(lambda: "libtorch" in Path(f"/proc/{one.pid}/maps").read_text())
        one.suspend()  # that its line is closed it cannot see
        parent.send_signal(signal.SIGKILL)
        until(lambda: not one.is_running() or one.status() == psutil.STATUS_ZOMBIE, 5)


def test_one_that_died_is_not_used(tmp_path: Path, standby: Callable[..., Standby]) -> None:
    one = standby(environment(tmp_path))
    one.process.kill()
    one.process.wait()
    assert not one.become(environment(tmp_path))


def noted_long_ago(file: Path, text: str) -> None:
    file.write_text(text)
    os.utime(file, (1.0, 1.0))


def test_one_that_died_is_replaced_without_imports_and_then_no_more(tmp_path: Path) -> None:
    noted = tmp_path / "imports_0"
    noted_long_ago(noted, '["rich"]')
    made: list[str] = []

    class Counted(Standbys):
        def make(self, environment: dict[str, str], imports: str = "[]") -> Standby:
            made.append(imports)
            return super().make(environment, imports)

    with Counted() as standbys:

        def keep() -> None:
            for _ in range(3):  # as the agent does, again and again
                standbys.keep(0, environment(tmp_path), noted)

        for expected in (['["rich"]'], ['["rich"]', "[]"], ['["rich"]', "[]"]):
            keep()
            assert made == expected
            one = standbys._waiting.get(0)
            if one is not None:
                one.process.kill()
                one.process.wait()
        assert standbys.take(0) is None


def test_they_start_one_after_the_other_and_end_with_the_agent(tmp_path: Path) -> None:
    noted = tmp_path / "imports_0"
    noted_long_ago(noted, "[]")
    with Standbys() as standbys:
        for local_rank in (0, 1):
            standbys.keep(local_rank, environment(tmp_path), noted)
        assert list(standbys._waiting) == [0]
        first = standbys._waiting[0]
        until(lambda: first.is_ready)
        standbys.keep(1, environment(tmp_path), noted)
        assert list(standbys._waiting) == [0, 1]
        processes = [standby.process for standby in standbys._waiting.values()]
    assert [process.poll() for process in processes] == [-signal.SIGKILL] * 2


def test_without_room_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = psutil.virtual_memory()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory._replace(available=memory.total // 20))
    noted_long_ago(tmp_path / "imports_0", "[]")
    with Standbys() as standbys:
        standbys.keep(0, environment(tmp_path), tmp_path / "imports_0")
        assert standbys.take(0) is None


def test_a_run_that_may_be_over_soon_has_none(tmp_path: Path) -> None:
    (tmp_path / "imports_0").write_text("[]")
    with Standbys() as standbys:
        standbys.keep(0, environment(tmp_path), tmp_path / "imports_0")
        assert standbys.take(0) is None


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_unfit_imports_end_a_standby_or_make_a_worker_that_starts_afresh(
    tmp_path: Path, standby: Callable[..., Standby]
) -> None:
    (tmp_path / "users_own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    one = standby(environment(tmp_path), '["users_own"]')
    assert one.process.wait(60) == 1
    # Told while it imports: it is needed now.
    (tmp_path / "users_own.py").write_text("")
    slow = [f"no_such_module_{number}" for number in range(3)]
    other = standby(environment(tmp_path), json.dumps([*slow, "users_own"]))
    assert other.become(environment(tmp_path, out="other"))
    assert other.process.wait(60) == 0
    assert (tmp_path / "other").exists() and not (tmp_path / "ran").exists()
