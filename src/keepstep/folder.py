"""The run folder: where a run keeps its settings, metrics, events, logs, checkpoints and result."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from keepstep.checkpoint.store import write_durably
from keepstep.errors import RunFolderError


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
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.seek(0)
            holder = lock.read().strip() or "another process"
            lock.close()
            raise RunFolderError(
                f"run '{self.name}' is running already, in {holder}; wait for it, stop it, or give another --name"
            ) from None
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}")
        lock.flush()
        self._lock = lock

    def release(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def is_held(self) -> bool:
        """Whether some process runs it now."""
        try:
            with (self.path / ".lock").open("a+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def event(self, kind: str, **fields: Any) -> None:
        """Appends a line to events.jsonl."""
        line = json.dumps({"time": round(time.time(), 3), "event": kind, **fields}, default=str)
        with self.events.open("a") as file:
            file.write(line + "\n")

    def read_events(self) -> list[dict[str, Any]]:
        return list(read_lines(self.events))

    def read_metrics(self) -> list[dict[str, Any]]:
        return list(read_lines(self.metrics))

    def write_config(self, config: dict[str, Any]) -> None:
        write_durably(self._config, json.dumps(config, indent=1, default=str))

    def read_config(self) -> dict[str, Any]:
        return _read_json(self._config)

    def write_result(self, result: dict[str, Any]) -> None:
        write_durably(self._result, json.dumps(result, indent=1, default=str))

    def read_result(self) -> dict[str, Any]:
        """The result, or an empty dict while there is none."""
        return _read_json(self._result)

    @property
    def finished(self) -> bool:
        return self.read_result().get("status") == "finished"


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a .jsonl file; a last line that a crash cut short is passed over."""
    if not path.exists():
        return
    with path.open() as file:
        for line in file:
            try:
                yield json.loads(line)
            except ValueError:
                if line.endswith("\n"):
                    raise RunFolderError(f"{path} has a line that is not JSON: {line[:80]!r}") from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise RunFolderError(f"{path} is not JSON: {error}") from None
    return content
