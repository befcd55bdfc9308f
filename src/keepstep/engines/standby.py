"""The supervisor's end of standbys: started while workers run, told what to become when one has died."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil

_SETTLED_S = 5.0
"""How long after a worker's first step: a run that is over by then needs none, and importing takes cores."""
_LEAST_FREE = 0.1
"""The part of the memory that must be free for a standby: it takes as much as a worker that has no model yet."""


class Standby:
    """A process that waits to become a worker.

    It dies with the thread that starts it, which must be one that outlives the workers.
    """

    def __init__(
        self, environment: dict[str, str], imports: str = "[]", folder: str | None = None, own_session: bool = True
    ) -> None:
        """`environment`: as a worker's, as far as it is known. `imports`: what a worker has noted of its own."""
        self._line, other = socket.socketpair()
        self._ready = False
        self._line.sendall(imports.encode() + b"\n")
        with other:
            self.process = subprocess.Popen(
                [sys.executable, "-c", f"from keepstep.standby import wait; wait({other.fileno()})"],
                env=environment,
                cwd=folder,
                pass_fds=[other.fileno()],
                start_new_session=own_session,
            )

    @property
    def is_ready(self) -> bool:
        """Whether everything is imported."""
        if not self._ready:
            with contextlib.suppress(OSError):
                self._ready = bool(self._line.recv(1, socket.MSG_DONTWAIT))
        return self._ready

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def become(self, environment: dict[str, str]) -> bool:
        """Makes it the worker with this environment, ready or not. False: it is gone."""
        with self._line, contextlib.suppress(OSError):
            if self.is_alive:
                self._line.sendall(json.dumps(environment).encode() + b"\n")
                return True
        return False

    def close(self) -> None:
        """Ends it, whatever it has become."""
        self._line.close()
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()


class Standbys:
    """One for each worker on this machine; started one after the other, so that they are not in the workers' way."""

    def __init__(self, folder: str | None = None, own_session: bool = True) -> None:
        """`folder`: where workers run; None: where this process does."""
        self._folder, self._own_session = folder, own_session
        self._waiting: dict[int, Standby] = {}
        self._died = 0

    def keep(self, local_rank: int, environment: dict[str, str], imports: Path) -> None:
        """Sees to it that there is one. A first that dies is replaced by one without the script's imports, which may
        not be fit for it; a second is not replaced."""
        standby = self._waiting.get(local_rank)
        if standby is not None and not standby.is_alive:
            self._died += 1
            self._waiting.pop(local_rank).close()
        elif standby is not None or self._died > 1 or not _is_settled(imports) or not self._is_room():
            return
        elif all(other.is_ready for other in self._waiting.values()):
            noted = imports.read_text() if self._died == 0 else "[]"
            self._waiting[local_rank] = self.make(environment, noted)

    def make(self, environment: dict[str, str], imports: str = "[]") -> Standby:
        return Standby(environment, imports, self._folder, self._own_session)

    def take(self, local_rank: int) -> Standby | None:
        return self._waiting.pop(local_rank, None)

    def close(self) -> None:
        for standby in self._waiting.values():
            standby.close()
        self._waiting.clear()

    def __enter__(self) -> Standbys:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _is_room(self) -> bool:
        memory = psutil.virtual_memory()
        return bool(memory.available > _LEAST_FREE * memory.total)


def _is_settled(imports: Path) -> bool:
    """A worker notes its imports with its first step."""
    return time.time() - imports.stat().st_mtime > _SETTLED_S
