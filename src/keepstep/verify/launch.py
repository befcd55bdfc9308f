"""A supervised run in a process of its own, which can be sent signals: forked, since importing torch takes seconds."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Imported before the fork, for all of the children.
import keepstep.engines.torchrun  # noqa: F401
from keepstep.errors import EXIT_FAILED, EXIT_USAGE, KeepstepError
from keepstep.folder import RunFolder
from keepstep.job import Target
from keepstep.supervisor import supervise

_PR_SET_PDEATHSIG = 1
_LEAVE_S = 10.0


@dataclass(frozen=True)
class Command:
    """What `keepstep run` would be told."""

    settings: dict[str, Any]
    target: Target
    log: Path
    """Where to put what it prints."""
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def folder(self) -> RunFolder:
        return RunFolder(self.settings["storage"], self.settings["name"])


class Launched:
    """One process that supervises a run. Its workers die with it, and it stops if this process dies."""

    def __init__(self, command: Command) -> None:
        self.began = time.time()
        self._code: int | None = None
        parent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _be_supervisor(command, parent)

    def poll(self) -> int | None:
        """The exit code, once there is one."""
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def wait(self) -> int:
        while (code := self.poll()) is None:
            time.sleep(0.02)
        return code

    def ask_to_stop(self) -> None:
        os.kill(self.pid, signal.SIGTERM)

    def __enter__(self) -> Launched:
        return self

    def __exit__(self, *_: object) -> None:
        """Whatever is still running saves and leaves; or is killed, if it does not in time."""
        deadline = time.monotonic() + _LEAVE_S
        if self.poll() is None:
            self.ask_to_stop()
        while self.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self.wait()


def _be_supervisor(command: Command, parent: int) -> None:
    """The child: never returns."""
    code = EXIT_FAILED
    try:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(code)
        descriptor = os.open(command.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.environ.update(command.environment)
        code = supervise(command.settings, command.target, fingerprints=True).exit_code
    except KeepstepError as error:
        print(f"keepstep: {error.title}: {error}", file=sys.stderr)
        code = EXIT_USAGE
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
