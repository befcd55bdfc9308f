"""One machine at a time runs a run in an object store; a dead one's hold ends by its silence."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepstep import holder as holder_module
from keepstep.checkpoint.mirror import HOLDER
from keepstep.checkpoint.remote import Remote
from keepstep.errors import RunFolderError, StorageError
from keepstep.folder import RunFolder
from keepstep.holder import Holder, is_alive, read_holder

memory = pytest.importorskip("fsspec.implementations.memory")


@pytest.fixture(autouse=True)
def _quick_and_empty(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(holder_module, "RENEW_S", 0.02)
    monkeypatch.setattr(holder_module, "SILENT_S", 0.3)
    monkeypatch.setattr(holder_module, "_LOOK_S", 0.05)
    yield
    memory.MemoryFileSystem.store.clear()
    memory.MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.fixture
def remote() -> Remote:
    return Remote.open("memory://bucket/run")


def test_a_live_holder_refuses_a_second_and_lets_go_at_the_end(remote: Remote, tmp_path: Path) -> None:
    first, second = Holder(remote, "run", tmp_path / "a"), Holder(remote, "run", tmp_path / "b")
    first.take()
    with pytest.raises(RunFolderError, match=r"run 'run' is running already, in process \d+ on .*; wait for it"):
        second.take()
    assert is_alive(remote)
    first.release()
    assert remote.sizes() == {} and not (tmp_path / "a").exists() and not is_alive(remote)
    second.take()
    second.release()
    second.release()


def test_a_dead_holder_is_waited_for_and_succeeded(
    remote: Remote, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Holder(remote, "run", tmp_path / "a")._renew()
    heir = Holder(remote, "run", tmp_path / "b")
    heir.take()
    assert "to see whether it lives" in capsys.readouterr().err
    heir.release()


def test_after_a_crash_the_same_machine_need_not_wait(
    remote: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holder_module, "SILENT_S", 1e9)
    dead = Holder(remote, "run", tmp_path / "mark")
    dead._renew()
    (tmp_path / "mark").write_text(dead._mark)
    again = Holder(remote, "run", tmp_path / "mark")
    again.take()
    again.release()


def test_a_process_of_this_machine_that_is_gone_is_not_waited_for(
    remote: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the cache, and with it the mark, is gone."""
    monkeypatch.setattr(holder_module, "SILENT_S", 1e9)
    Holder(remote, "run", tmp_path / "dead")._renew()
    alive = read_holder(remote)
    assert alive is not None and alive["pid"] == os.getpid()
    gone = subprocess.Popen(["true"])
    gone.wait()
    for change in ({"pid": gone.pid}, {"began": alive["began"] - 1}):
        remote.write(HOLDER, json.dumps({**alive, **change}).encode())
        heir = Holder(remote, "run", tmp_path / "heir")
        heir.take()
        heir.release()


@pytest.mark.parametrize(
    "change",
    [{}, {"pid": 2**30, "host": "other"}, {"pid": 2**30, "boot": "other"}, {"pid": "x"}, {"pid": 2**30, "began": None}],
    ids=str,
)
def test_any_other_holder_is_waited_for(
    remote: Remote, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, object]
) -> None:
    Holder(remote, "run", tmp_path / "other")._renew()
    found = read_holder(remote)
    assert found is not None
    remote.write(HOLDER, json.dumps({**found, **change}).encode())
    heir = Holder(remote, "run", tmp_path / "heir")
    heir.take()
    heir.release()
    assert "to see whether it lives" in capsys.readouterr().err


@pytest.mark.parametrize("text", [b"", b"[]", b'{"mark": 3}', b"\xff"])
def test_a_holder_that_cannot_be_read_is_still_one(remote: Remote, text: bytes) -> None:
    remote.write(HOLDER, text)
    assert read_holder(remote) == {"mark": "", "who": "another process"}


def test_a_holder_that_was_succeeded_neither_renews_nor_deletes(remote: Remote, tmp_path: Path) -> None:
    lost = Holder(remote, "run", tmp_path / "a")
    lost.take()
    heir = Holder(remote, "run", tmp_path / "b")
    heir._renew()
    thread = lost._thread
    assert thread is not None
    thread.join(5)
    lost.release()
    now = read_holder(remote)
    assert now is not None and now["mark"] == heir._mark


def test_two_at_one_moment_are_told_apart(remote: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    late = Holder(remote, "run", tmp_path / "b")
    early = Holder(remote, "run", tmp_path / "a")
    real = early._renew

    def then_the_other() -> None:
        real()
        late._renew()

    monkeypatch.setattr(early, "_renew", then_the_other)
    with pytest.raises(RunFolderError, match="is running already"):
        early.take()


def test_a_hold_that_cannot_be_let_go_of_keeps_its_mark(
    remote: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Holder(remote, "run", tmp_path / "mark")
    held.take()

    def fail(*_: object) -> None:
        raise StorageError("away")

    monkeypatch.setattr(Remote, "delete", fail)
    held.release()
    assert (tmp_path / "mark").exists() and remote.exists(HOLDER)


def test_a_run_folder_holds_both_and_leaves_no_lock_when_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEEPSTEP_CACHE", str(tmp_path / "a"))
    first = RunFolder("memory://bucket/runs", "vit")
    first.create()
    first.hold()
    monkeypatch.setenv("KEEPSTEP_CACHE", str(tmp_path / "b"))
    second = RunFolder("memory://bucket/runs", "vit")
    second.create()
    with pytest.raises(RunFolderError, match="is running already"):
        second.hold()
    assert not (tmp_path / "b").exists(), "nothing came of it, and nothing is left of it"
    first.release()
    second.create()
    second.hold()
    assert second.is_held()
    second.release()
    assert not second.is_held()
