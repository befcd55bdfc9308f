"""The run folder: where a run keeps its settings, metrics, events, logs, checkpoints and result.

A run whose storage is an object store has its folder in a cache on this machine, and a mirror in the store.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import socket
import stat
import time
import weakref
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from keepstep.checkpoint.store import LOST_METRICS, WRITING, FetchingStore, Store, write_durably
from keepstep.checkpoint.untrusted import shown
from keepstep.errors import RunFolderError, StorageError
from keepstep.standard_json import to_json
from keepstep.storage import Storage

if TYPE_CHECKING:
    from keepstep.checkpoint.mirror import Mirror
    from keepstep.holder import Holder

_HOLD_WITHIN_S = 0.5
"""How long to try for the lock: somebody who only looks (`is_held`) has it for a moment, too."""
_HURRY_S = 5.0


class RunFolder:
    """One run's folder: `<storage>/<name>/`."""

    def __init__(self, storage: str | Path, name: str) -> None:
        self.name = name
        self._storage = Storage.parse(storage)
        self.path = self._storage.folder / name
        self.metrics = self.path / "metrics.jsonl"
        self.events = self.path / "events.jsonl"
        self.logs = self.path / "logs"
        self.checkpoints = self.path / "checkpoints"
        self.artifacts = self.path / "artifacts"
        self._config = self.path / "config.json"
        self._result = self.path / "result.json"
        self._ledger = self.path / "ledger.json"
        self._mark = self.path / ".holder"
        self._lock: IO[str] | None = None
        self._holder: Holder | None = None
        self._made: list[Path] = []
        """Folders that this process has made for the run, the innermost first."""

    @property
    def storage(self) -> str:
        """Where runs live, wherever it is said: an address, or an absolute path."""
        return self._storage.url or str(self._storage.folder.absolute())

    @property
    def where(self) -> str:
        """What to call its place to the user."""
        return f"{self._storage.url}/{self.name}" if self._storage.url else str(self.path)

    @cached_property
    def mirror(self) -> Mirror | None:
        """The run in the object store; None where the storage is a folder."""
        if self._storage.url is None:
            return None
        from keepstep.checkpoint.mirror import Mirror
        from keepstep.checkpoint.remote import Remote

        return Mirror(Remote.open(self.where), self.path, self._mark)

    def fetch(self, is_behind: bool = False) -> None:
        """Brings the small files up to date, where the object store's are ahead of them, or known to be."""
        if self.mirror is not None and (is_behind or not self.finished):
            self.mirror.fetch_files([] if is_behind else Store(self.checkpoints, keep=1).steps(), is_behind)

    def push(self) -> None:
        """Uploads the small files to the object store, if there is one, and if the run is still this one's there."""
        if self.mirror is not None and self.mirror.successor() is None:
            self.mirror.push_files()

    def push_after_failure(self) -> None:
        """The same, as far as it goes: the failure, which may be the object store's, is what the user must hear of."""
        if self.mirror is not None:
            self.mirror.remote = self.mirror.remote.hurried(_HURRY_S)
            with contextlib.suppress(StorageError):
                self.push()

    def push_end(self) -> None:
        """Uploads them where the run has finished here, but its end did not get there."""
        if self.mirror is not None and not self.mirror.has_finished():
            self.mirror.push_files()

    def store_to_read(self) -> Store:
        """The checkpoints, for commands that only look: those of the object store are fetched when they are needed."""
        if self.mirror is None:
            return Store(self.checkpoints, keep=1)
        return FetchingStore(self.checkpoints, 1, self.mirror)

    def create(self) -> None:
        """Makes the folder, and makes sure that it can be written."""
        self._made = [folder for folder in (self.logs, *self.logs.parents) if not folder.exists()]
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            probe = self.path / f".probe-{os.getpid()}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise RunFolderError(
                f"the run folder {self.path} cannot be written ({error.strerror}); give another one with --storage"
            ) from None

    def hold(self) -> None:
        """Takes the folder for this process; a second run under the same name is refused while it lives."""
        lock = (self.path / ".lock").open("a+")
        if not _lock_within(lock, _HOLD_WITHIN_S):
            lock.seek(0)
            holder = lock.read().strip() or "another process"
            lock.close()
            raise RunFolderError(
                f"run '{self.name}' is running already, in {holder}; wait for it, stop it, or give another --name"
            )
        self._sweep()
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}")
        lock.flush()
        self._lock = lock
        _held.add(self)
        if self.mirror is not None:
            self._hold_in_store(self.mirror)

    def _sweep(self) -> None:
        """Deletes what a killed process was writing beside its files."""
        leftovers = [*self.path.glob(".*.json-*"), *self.artifacts.rglob(f"{WRITING}*")]
        for leftover in leftovers:
            leftover.unlink(missing_ok=True)

    def _hold_in_store(self, mirror: Mirror) -> None:
        from keepstep.holder import Holder

        try:
            holder = Holder(mirror.remote, self.name, self._mark)
            holder.take()
            self._holder = holder
        except BaseException:
            self.withdraw()
            self.unlock()
            raise

    def withdraw(self) -> None:
        """Takes back the folders that this process, which holds them, made for a run that was then refused."""
        if self.path not in self._made or any(entry.name not in (".lock", "logs") for entry in self.path.iterdir()):
            return
        with contextlib.suppress(OSError):  # not empty: somebody else's
            self._made[0].rmdir()  # the logs
            (self.path / ".lock").unlink(missing_ok=True)
            for folder in self._made[1:]:
                folder.rmdir()

    def forget_hold(self) -> None:
        """Another machine holds the run: what an earlier process left here must not be taken for its mark."""
        if self.mirror is not None:
            self._mark.unlink(missing_ok=True)

    def release(self) -> None:
        if self._holder is not None:
            self._holder.release()
            self._holder = None
        self.unlock()

    def unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def is_held(self) -> bool:
        """Whether some process runs it now."""
        if self.mirror is not None:
            from keepstep.holder import is_alive

            return is_alive(self.mirror.remote)
        try:
            # Not waited for: in a folder that is anybody's, it may be a pipe.
            with os.fdopen(os.open(self.path / ".lock", os.O_RDONLY | os.O_NONBLOCK)) as lock:
                # Shared: two that look do not take each other for the run.
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # there is no lock, or it is not for us to read
            return False
        return False

    def event(self, kind: str, **fields: Any) -> None:
        """Appends a line to events.jsonl."""
        event = {"time": round(time.time(), 3), "event": kind, **fields}
        line = to_json(event, default=str) + "\n"
        with _as_one_line(self.events), self.events.open("ab+", buffering=0) as file:
            # A crash or a full disk may have cut the last line short: this one must not become part of it.
            data = (("\n" if _lacks_newline(file) else "") + line).encode()
            while data:  # unbuffered, so that a line is one write, which another process's cannot come into
                data = data[file.write(data) :]

    def read_events(self) -> list[dict[str, Any]]:
        return [_event(event, self.events) for event in read_lines(self.events)]

    def read_metrics(self) -> list[dict[str, Any]]:
        return list(read_lines(self.metrics))

    def keep_metrics(self) -> str | None:
        """Puts a copy of the metrics beside them, before they are begun anew; returns its name, if there are any."""
        if not self.metrics.exists() or not self.metrics.stat().st_size:
            return None
        kept = self.path / f"{LOST_METRICS}{time.strftime('%Y%m%d-%H%M%S')}.jsonl"
        with _as_one_line(kept):
            shutil.copyfile(self.metrics, kept)
        return kept.name

    def write_config(self, config: dict[str, Any]) -> None:
        with _as_one_line(self._config):
            write_durably(self._config, json.dumps(config, indent=1, default=str))

    def read_config(self) -> dict[str, Any]:
        return _typed(_read_json(self._config), _CONFIG, self._config)

    def write_result(self, result: dict[str, Any]) -> None:
        with _as_one_line(self._result):
            write_durably(self._result, to_json(result, indent=1, default=str))

    def write_ledger(self, ledger: dict[str, Any]) -> None:
        """Where the time of the launch under way has gone so far."""
        with _as_one_line(self._ledger):
            # Not onto the disk: it is written often, and a machine that fails takes more than this with it.
            half = self._ledger.with_name(".ledger.json-half")
            half.write_text(to_json(ledger))
            half.replace(self._ledger)

    def read_ledger(self) -> dict[str, Any]:
        """Empty while no launch is under way, or was killed."""
        return _typed(_read_json(self._ledger), _RESULT, self._ledger)

    def remove_ledger(self) -> None:
        self._ledger.unlink(missing_ok=True)

    def read_result(self) -> dict[str, Any]:
        """The result, or an empty dict while there is none."""
        return _with_numbers(_typed(_read_json(self._result), _RESULT, self._result), self._result)

    @property
    def finished(self) -> bool:
        return self.read_result().get("status") == "finished"


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a .jsonl file; lines that a crash cut short are passed over."""
    file = _open(path)
    if file is None:
        return
    with file:
        for line in file:
            text = line.strip("\0\n")  # a power cut can leave zeros where data should be
            try:
                found = json.loads(text) if text else None
            except (ValueError, RecursionError):
                if text.startswith("{"):  # the beginning of a line of ours
                    continue
                raise RunFolderError(f"{path} has a line that is not JSON: {shown(line)}") from None
            if isinstance(found, dict):
                yield found
            elif text:
                raise RunFolderError(f"{path} has a line that is no JSON object: {shown(line)}")


def check_numbers(found: object, where: Path) -> dict[str, float]:
    """Metrics as they were before they were written (NaN is no string); raises if they are anything else."""
    try:
        if isinstance(found, dict):
            return {name: float(value) for name, value in found.items()}
    except (TypeError, ValueError, OverflowError):
        pass
    raise RunFolderError(f"{where} has metrics that are {shown(found)}; an object of numbers was expected")


@contextlib.contextmanager
def _as_one_line(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunFolderError(f"{path} could not be written ({error.strerror or error})") from error


def _lacks_newline(file: IO[bytes]) -> bool:
    if not file.seek(0, os.SEEK_END):
        return False
    file.seek(-1, os.SEEK_END)
    return file.read(1) != b"\n"


def _with_numbers(entry: dict[str, Any], where: Path) -> dict[str, Any]:
    return {**entry, "metrics": check_numbers(entry["metrics"], where)} if "metrics" in entry else entry


def _event(raw: dict[str, Any], where: Path) -> dict[str, Any]:
    """An event that has a kind and a time, whatever else is in it."""
    if not isinstance(raw.get("event"), str) or type(raw.get("time")) not in (int, float):
        raise RunFolderError(f"{where} has a line that is no event with a time: {shown(raw)}")
    return _with_numbers(raw, where)


_CONFIG: dict[str, type] = {"settings": dict, "script": str, "arguments": list}
_RESULT: dict[str, type] = {"status": str, "step": int, "seconds": dict}
"""The types that those who read a file's fields rely on."""


def _typed(found: dict[str, Any], types: dict[str, type], where: Path) -> dict[str, Any]:
    for name, kind in types.items():
        if name in found and type(found[name]) is not kind:
            raise RunFolderError(f"{where} has {shown(found[name])} as {name!r}; a {kind.__name__} was expected")
    return found


def _lock_within(file: IO[str], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        except OSError as error:
            file.close()
            raise RunFolderError(
                f"{file.name} cannot be locked ({error.strerror}); give another folder with --storage"
            ) from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        file = _open(path)
        if file is None:
            return {}
        with file:
            content = json.load(file)
    except ValueError as error:
        raise RunFolderError(f"{path} is not JSON: {error}") from None
    except RecursionError:
        raise RunFolderError(f"{path} is not JSON of ours: it is nested too deeply") from None
    if not isinstance(content, dict):
        raise RunFolderError(f"{path} holds a {type(content).__name__}; an object was expected")
    return content


def _open(path: Path) -> IO[str] | None:
    """A file of a run that may be anybody's; None where there is none. A pipe would be waited for for ever."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise RunFolderError(f"{path} cannot be read ({error.strerror})") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise RunFolderError(f"{path} is not a regular file; a run has no folder, pipe or device of that name")
    return os.fdopen(descriptor, encoding="utf-8", errors="replace")


_held: weakref.WeakSet[RunFolder] = weakref.WeakSet()


def _let_go_in_child() -> None:
    """A forked DataLoader worker outlives, for seconds, a run that is killed: the lock must not live on in it."""
    for folder in list(_held):
        folder.unlock()  # closes the child's end; the parent's still holds


os.register_at_fork(after_in_child=_let_go_in_child)
