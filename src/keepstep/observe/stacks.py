"""Where a worker is: its Python stacks on demand, also while it is stuck in native code."""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from keepstep.observe.heart import Pulse, stack_file

STACKS_SIGNAL = signal.SIGRTMIN + 6 if sys.platform == "linux" else signal.SIGUSR2
"""Schedulers give notice with SIGUSR1 and SIGUSR2: another, where there are more."""
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')
_HEAD = re.compile(r"^(Current thread|Thread) (0x[0-9a-f]+)")
_MOST_BYTES = 1 << 16
_NEW = b"\n=== keepstep: stacks ===\n"


@dataclass(frozen=True)
class Frame:
    """One line of a stack."""

    file: str
    line: int
    function: str

    @property
    def is_users(self) -> bool:
        """Whether it is of the script, or of what belongs to it: not of Python, an installed package or keepstep."""
        return not self.file.startswith((_OURS, *_INSTALLED, "<"))

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line} in {self.function}"


_OURS = str(Path(__file__).parent.parent) + os.sep
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


class StackWriter:
    """Has `STACKS_SIGNAL` make this process write the stacks of all of its threads beside its heart."""

    def __init__(self, heart: Path, when_it_crashes: bool) -> None:
        self._file = os.open(stack_file(heart), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        faulthandler.register(STACKS_SIGNAL, file=self._file, all_threads=True, chain=False)
        if when_it_crashes:
            faulthandler.enable(self._file, all_threads=True)

    def close(self) -> None:
        faulthandler.unregister(STACKS_SIGNAL)
        os.close(self._file)


def ask_for_stacks(pulse: Pulse) -> None:
    """Of a worker on this machine."""
    with pulse.stack_file.open("ab") as file:
        file.write(_NEW)
    _send(pulse.pid, STACKS_SIGNAL)


def kill(pulse: Pulse) -> None:
    """Ends a worker on this machine that cannot be talked to."""
    _send(pulse.pid, signal.SIGKILL)


def _send(pid: int, number: int) -> None:
    if pid:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return


def stack_of(pulse: Pulse) -> list[Frame]:
    """The worker's newest stack, innermost frame first; empty where it has left none."""
    if not pulse.stack_file.exists():
        return []
    return newest_stack(pulse.stack_file.read_bytes()[-_MOST_BYTES:].decode(errors="replace"))


def newest_stack(text: str) -> list[Frame]:
    """The main thread's stack of the newest dump."""
    dump = text.rpartition(_NEW.decode().strip())[2]
    stacks: list[list[Frame]] = []
    for line in dump.splitlines():
        if _HEAD.match(line):
            stacks.append([])
        elif stacks and (match := _FRAME.match(line)):
            stacks[-1].append(Frame(match["file"], int(match["line"]), match["function"]))
    return stacks[-1] if stacks else []  # faulthandler lists the oldest thread, the main one, last


def where(stack: list[Frame]) -> str:
    """A stack in a few words: the innermost line of the script, and what it is stuck in."""
    if not stack:
        return "where it is could not be read"
    innermost = stack[0]
    users = next((frame for frame in stack if frame.is_users), None)
    if users is None:
        return str(innermost)
    return str(users) if users == innermost else f"{users}, inside {innermost}"
