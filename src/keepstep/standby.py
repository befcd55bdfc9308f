"""A standby: an interpreter that has imported what takes longest, and waits to become a worker when one has died."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import IO, NoReturn

from keepstep.imports import Unfit, import_ahead
from keepstep.job import TARGET, Target
from keepstep.lifeline import die_with_parent

READY = b"r"
WORKER = "from keepstep.worker import main; main()"
"""The program of a worker that is started afresh."""


def wait(line: int) -> None:
    """Waits on the socket `line` for two lines of JSON: what to import beside torch, and, if and when a worker is
    needed, its environment."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    given = dict(os.environ)
    _silence()
    _step_back()
    supervisor = socket.socket(fileno=line)
    words = supervisor.makefile()
    names = json.loads(words.readline() or "[]")
    from keepstep import worker  # torch comes with it

    try:
        import_ahead(names, _script_folder(), lambda: _has_word(supervisor))
    except Unfit:
        _start_afresh(words) if _has_word(supervisor) else os._exit(1)
    with suppress(OSError):  # it may have said its word already, and hung up
        supervisor.sendall(READY)
    told = _told(words)
    supervisor.close()
    for name in given.keys() - told.keys():
        os.environ.pop(name, None)
    os.environ.update(told)
    _step_forward()
    worker.main()


def _has_word(supervisor: socket.socket) -> bool:
    return bool(select.select([supervisor], [], [], 0)[0])


def _told(words: IO[str]) -> dict[str, str]:
    text = words.readline()
    words.close()
    if not text:  # nobody has died
        os._exit(0)
    told: dict[str, str] = json.loads(text)
    return told


def _start_afresh(words: IO[str]) -> NoReturn:
    """Becomes the worker without anything imported: it is waited for already."""
    import psutil

    told = _told(words)
    for child in psutil.Process().children(recursive=True):
        child.kill()
    _step_forward()
    os.execve(sys.executable, [sys.executable, "-c", WORKER], told)


def _script_folder() -> str | None:
    text = os.environ.get(TARGET)
    target = Target.from_json(text) if text is not None else None  # started before it is known
    return str(Path(target.what).resolve().parent) if target is not None and target.is_script else None


def _silence() -> None:
    """What imports print belongs in a worker's log, and comes there when it runs."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    os.close(nowhere)


def _step_back() -> None:
    """Lets the workers go first. Not by `nice`, nor by SCHED_IDLE, which only a privileged process can take back."""
    if sys.platform == "linux":
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _step_forward() -> None:
    if sys.platform == "linux":
        for thread in Path("/proc/self/task").iterdir():  # those that libraries have started, too
            os.sched_setscheduler(int(thread.name), os.SCHED_OTHER, os.sched_param(0))
