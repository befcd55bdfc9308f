"""The run folder: where a run keeps its settings, metrics, events, logs, checkpoints and result."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from keepstep.checkpoint.store import write_durably
from keepstep.errors import RunFolderError
from keepstep.standard_json import to_json

_HOLD_WITHIN_S = 0.5
"""How long to try for the lock: somebody who only looks (`is_held`) has it for a moment, too."""


class RunFolder:
    """One run's folder: `<storage>/<name>/`."""

    def __init__(self, storage: str | Path, name: str) -> None:
        self.name = name
        self.path = Path(storage).expanduser() / name
        self.metrics = self.path / "metrics.jsonl"
        self.events = self.path / "events.jsonl"
        self.logs = self.path / "logs"
        self.checkpoints = self.path / "checkpoints"
        self.artifacts = self.path / "artifacts"
        self._config = self.path / "config.json"
        self._result = self.path / "result.json"
        self._lock: IO[str] | None = None

    def create(self) -> None:
        """Makes the folder, and makes sure that it can be written."""
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
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}")
        lock.flush()
        self._lock = lock
        _held.add(self)

    def release(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def is_held(self) -> bool:
        """Whether some process runs it now."""
        try:
            with (self.path / ".lock").open() as lock:
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
        with self.events.open("ab+", buffering=0) as file:
            # A crash or a full disk may have cut the last line short: this one must not become part of it.
            data = (("\n" if _lacks_newline(file) else "") + line).encode()
            while data:  # unbuffered, so that a line is one write, which another process's cannot come into
                data = data[file.write(data) :]

    def read_events(self) -> list[dict[str, Any]]:
        return [_with_numbers(event) for event in read_lines(self.events)]

    def read_metrics(self) -> list[dict[str, Any]]:
        return list(read_lines(self.metrics))

    def write_config(self, config: dict[str, Any]) -> None:
        write_durably(self._config, json.dumps(config, indent=1, default=str))

    def read_config(self) -> dict[str, Any]:
        return _read_json(self._config)

    def write_result(self, result: dict[str, Any]) -> None:
        write_durably(self._result, to_json(result, indent=1, default=str))

    def read_result(self) -> dict[str, Any]:
        """The result, or an empty dict while there is none."""
        return _with_numbers(_read_json(self._result))

    @property
    def finished(self) -> bool:
        return self.read_result().get("status") == "finished"


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a .jsonl file; lines that a crash cut short are passed over."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            text = line.strip("\0\n")  # a power cut can leave zeros where data should be
            try:
                if text:
                    yield json.loads(text)
            except ValueError:
                if not text.startswith("{"):  # not the beginning of a line of ours
                    raise RunFolderError(f"{path} has a line that is not JSON: {line[:80]!r}") from None


def _lacks_newline(file: IO[bytes]) -> bool:
    if not file.seek(0, os.SEEK_END):
        return False
    file.seek(-1, os.SEEK_END)
    return file.read(1) != b"\n"


def _with_numbers(entry: dict[str, Any]) -> dict[str, Any]:
    """With metrics as they were before they were written: NaN is no string."""
    if "metrics" not in entry:
        return entry
    return {**entry, "metrics": {name: float(value) for name, value in entry["metrics"].items()}}


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
        content: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise RunFolderError(f"{path} is not JSON: {error}") from None
    return content


_held: weakref.WeakSet[RunFolder] = weakref.WeakSet()


def _let_go_in_child() -> None:
    """A forked DataLoader worker outlives, for seconds, a run that is killed: the lock must not live on in it."""
    for folder in list(_held):
        folder.release()  # closes the child's end; the parent's still holds


os.register_at_fork(after_in_child=_let_go_in_child)
