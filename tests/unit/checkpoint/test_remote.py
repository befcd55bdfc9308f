"""The client of object stores: tries again what may pass, at once gives up what cannot, and says it in one line."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from keepstep.checkpoint import remote as remote_module
from keepstep.checkpoint.remote import MissingObject, Remote
from keepstep.errors import ConfigError, StorageError

memory = pytest.importorskip("fsspec.implementations.memory")


class Flaky:
    """A file system that fails as told before it does what it is asked."""

    def __init__(self, files: Any, *errors: Exception) -> None:
        self._files, self.errors, self.calls = files, list(errors), 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._files, name)
        if not callable(found):
            return found

        def call(*args: Any, **options: Any) -> Any:
            self.calls += 1
            if self.errors:
                raise self.errors.pop(0)
            return found(*args, **options)

        return call


@pytest.fixture(autouse=True)
def _empty_and_quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(remote_module, "_LONGEST_PAUSE_S", 0.001)
    yield
    memory.MemoryFileSystem.store.clear()
    memory.MemoryFileSystem.pseudo_dirs[:] = [""]


def flaky(*errors: Exception) -> tuple[Remote, Flaky]:
    files = Flaky(memory.MemoryFileSystem(), *errors)
    return Remote(files, "/bucket/run", "memory://bucket/run"), files


def test_what_is_put_can_be_listed_read_fetched_and_deleted(tmp_path: Path) -> None:
    remote = Remote.open("memory://bucket/run/")
    (tmp_path / "file").write_bytes(b"content")
    assert remote.sizes() == {} and remote.folders() == [] and not remote.exists("d/file")
    remote.put(tmp_path / "file", "d/file")
    remote.write("top", b"1")
    assert remote.sizes() == {"d/file": 7, "top": 1} and remote.sizes("d") == {"d/file": 7}
    assert remote.folders() == ["d"] and remote.exists("d/file") and remote.read("top") == b"1"
    remote.get("d/file", tmp_path / "new" / "file")
    assert (tmp_path / "new" / "file").read_bytes() == b"content"
    remote.delete("d/file", "never there")
    remote.delete()
    assert remote.sizes() == {"top": 1}


@pytest.mark.parametrize(
    "error", [OSError("reset by peer"), TimeoutError(), ConnectionResetError("x"), RuntimeError("?")]
)
def test_what_may_pass_is_tried_again(error: Exception, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    remote, files = flaky(error, error, error)
    remote.put(tmp_path / "file", "k")
    assert files.calls == 4
    files.errors = [error]
    assert remote.read("k") == b"content"


@pytest.mark.parametrize(
    "error",
    [
        PermissionError("Forbidden"),
        OSError("AWS Error ACCESS_DENIED during PutObject operation"),
        OSError("AWS Error NO_SUCH_BUCKET during PutObject operation"),
        FileNotFoundError("The specified bucket does not exist"),
        OSError(28, "No space left on device"),
        type("NoCredentialsError", (Exception,), {})("Unable to locate credentials"),
    ],
    ids=lambda error: str(error)[:20],
)
def test_what_cannot_pass_is_tried_once(error: Exception) -> None:
    remote, files = flaky(error, error)
    with pytest.raises(StorageError) as raised:
        remote.write("k", b"")
    assert files.calls == 1
    assert str(raised.value).startswith("memory://bucket/run/k could not be written (")
    assert "\n" not in str(raised.value)


def test_it_ends_in_time_and_says_how_often_it_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_module, "FIRST_PATIENCE_S", 0.05)
    remote, files = flaky(*(OSError(f"refused\n{number}") for number in range(10_000)))
    with pytest.raises(StorageError) as error:
        remote.read("k")
    message = str(error.value)
    assert (
        message
        == f"memory://bucket/run/k could not be read, tried {files.calls} times in 0 s (refused {files.calls - 1})"
    )
    assert files.calls > 2


def test_a_store_that_has_answered_is_worth_more_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_module, "FIRST_PATIENCE_S", 0.0)
    remote, files = flaky(OSError("refused"))
    with pytest.raises(StorageError):
        remote.write("k", b"")
    remote.write("k", b"")
    files.errors = [OSError("refused")] * 3
    remote.write("k", b"")
    files.errors = [OSError("refused")] * 10_000
    with pytest.raises(StorageError):
        remote.hurried(0.01).write("k", b"")


def test_a_store_that_has_never_answered_is_waited_for_in_words_once(capsys: pytest.CaptureFixture[str]) -> None:
    remote, files = flaky(*[OSError("connection\nrefused")] * 3)
    remote.write("k", b"")
    said = "keepstep: memory://bucket/run does not answer (connection refused); trying for 30 s\n"
    assert capsys.readouterr().err == said
    files.errors = [OSError("reset")] * 3
    remote.write("k", b"")
    assert capsys.readouterr().err == "", "it has answered before: that may pass"


def test_a_missing_object_is_told_from_a_missing_bucket() -> None:
    remote, files = flaky()
    with pytest.raises(MissingObject):
        remote.read("k")
    files.errors = [FileNotFoundError("The specified bucket does not exist")]
    with pytest.raises(StorageError, match="is there such a bucket") as error:
        remote.exists("k")
    assert not isinstance(error.value, MissingObject)


def test_a_download_that_comes_short_is_tried_again_and_never_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote, files = flaky()
    remote.write("k", b"content")
    real, short = files._files.get_file, [b"con", b""]

    def get(source: str, target: str) -> None:
        assert not (tmp_path / "k").exists()
        if short:
            Path(target).write_bytes(short.pop())
        else:
            real(source, target)

    monkeypatch.setattr(files._files, "get_file", get)  # put back: fsspec gives every test the same object
    remote.get("k", tmp_path / "k")
    assert (tmp_path / "k").read_bytes() == b"content" and not short
    assert [path.name for path in tmp_path.iterdir()] == ["k"]


def test_pauses_draw_nothing_from_the_trainings_generator() -> None:
    remote, _ = flaky(*[OSError("refused")] * 5)
    before = random.getstate()
    remote.write("k", b"")
    assert random.getstate() == before


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_module, "_arrow_file_system", lambda url: None)
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(
        ConfigError, match=r"--storage gs://b/x needs a package that is not installed: pip install 'gcsfs'"
    ):
        Remote.open("gs://b/x")
    with pytest.raises(ConfigError, match=r"--storage zz://b: .*zz"):
        Remote.open("zz://b")
