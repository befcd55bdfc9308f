"""Who runs a run that lies in an object store: one machine at a time, by an object that is renewed while it lives."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import Any

from keepstep.checkpoint.mirror import HOLDER
from keepstep.checkpoint.remote import MissingObject, Remote
from keepstep.errors import RunFolderError, StorageError

RENEW_S = 30.0
SILENT_S = 180.0
"""A holder that has not renewed for so long is taken for dead."""
_LOOK_S = 2.0
_PATIENCE_S = 30.0
"""Less than for uploads: a hold that cannot be renewed in time is lost anyway."""
_RELEASE_PATIENCE_S = 3.0


class Holder:
    """This process's hold on a run. No machine's clock is believed: the store tells ages, and a counter tells life."""

    def __init__(self, remote: Remote, name: str, mark_file: Path) -> None:
        """`mark_file`: keeps this hold's mark on this machine, for the workers, and for whoever comes after a crash."""
        self._remote, self._name, self._mark_file = remote.hurried(_PATIENCE_S), name, mark_file
        self._mark = uuid.uuid4().hex
        self._renewals = 0
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def take(self) -> None:
        """Takes the run; where another seems to hold it, waits to see whether that one lives, and raises if so."""
        self._outlive(read_holder(self._remote))
        self._renew()
        holder = read_holder(self._remote)
        if holder is None or holder["mark"] != self._mark:  # another took it at the same moment
            raise self._refusal(holder or {})
        self._mark_file.write_text(self._mark)
        self._thread = threading.Thread(target=self._keep, name="keepstep-hold", daemon=True)
        self._thread.start()

    def release(self) -> None:
        if self._thread is None:
            return
        self._ended.set()
        self._thread.join(_RELEASE_PATIENCE_S)  # it may be waiting for a store that does not answer
        self._thread = None
        remote = self._remote.hurried(_RELEASE_PATIENCE_S)
        try:
            holder = read_holder(remote)
            if holder is not None and holder["mark"] == self._mark:
                remote.delete(HOLDER)
        except StorageError:
            return  # the mark stays: on this machine the run can go on at once, on others after the silence
        self._mark_file.unlink(missing_ok=True)

    def _outlive(self, holder: dict[str, Any] | None) -> None:
        """Returns once nobody else holds the run."""
        if holder is None or holder["mark"] == self._mark_of_the_dead() or _died_here(holder):
            return
        silent_s = self._silence()
        if silent_s < SILENT_S:
            seen = f"keepstep: {holder['who']} held run '{self._name}' {silent_s:.0f} s ago"
            print(f"{seen}; waiting up to {SILENT_S - silent_s:.0f} s to see whether it lives", file=sys.stderr)
        began = time.monotonic()
        while holder is not None and silent_s + time.monotonic() - began < SILENT_S:
            time.sleep(_LOOK_S)
            now = read_holder(self._remote)
            if now is not None and now != holder:
                raise self._refusal(now)
            holder = now

    def _mark_of_the_dead(self) -> str | None:
        """The mark of the last process that held the run from this machine: the folder's lock says that it is gone."""
        return self._mark_file.read_text() if self._mark_file.exists() else None

    def _silence(self) -> float:
        """Seconds since the holder renewed, by the store's own clock: an object that is written now tells it."""
        probe = f".clock-{self._mark}"
        try:
            self._remote.write(probe, b"now")
            return self._remote.modified(probe) - self._remote.modified(HOLDER)
        except MissingObject:
            return 0.0
        finally:
            self._remote.delete(probe)

    def _refusal(self, holder: dict[str, Any]) -> RunFolderError:
        who = holder.get("who", "another process")
        return RunFolderError(
            f"run '{self._name}' is running already, in {who}; wait for it, stop it, or give another --name"
        )

    def _renew(self) -> None:
        self._renewals += 1
        process = {**_this_boot(), "pid": os.getpid(), "began": _began(os.getpid())}
        who = f"process {process['pid']} on {process['host']}"
        content = {"who": who, "mark": self._mark, "renewals": self._renewals, "time": time.time(), **process}
        self._remote.write(HOLDER, json.dumps(content).encode())

    def _keep(self) -> None:
        while not self._ended.wait(RENEW_S):
            try:
                holder = read_holder(self._remote)
                if holder is not None and holder["mark"] != self._mark:
                    return  # taken over; the next checkpoint will say so
                self._renew()
            except StorageError:  # the next time, perhaps; until then uploads fail as well
                continue


def _this_boot() -> dict[str, str]:
    """What tells this machine, since it was started, from every other. A container has its own name, and a fresh
    numbering of processes, on the boot of its host."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = str(Path("/proc/self/ns/pid").readlink())
    except OSError:  # not Linux
        return {"host": socket.gethostname(), "boot": ""}
    return {"host": socket.gethostname(), "boot": f"{boot} {namespace}"}


def _began(pid: int) -> int | None:
    """When a process was started, in ticks since the machine was, which no clock that is set changes; None where
    there is none of that number."""
    try:
        after_its_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
        return int(after_its_name.split()[19])
    except (OSError, ValueError, IndexError):
        return None


def _died_here(holder: dict[str, Any]) -> bool:
    """Whether the holder was a process of this machine that is gone, though its cache with the mark may be, too."""
    here = _this_boot()
    pid, began = holder.get("pid"), holder.get("began")
    if (
        not here["boot"]
        or type(pid) is not int
        or type(began) is not int
        or any(holder.get(name) != value for name, value in here.items())
    ):
        return False
    return _began(pid) != began  # gone, or its number is another's by now


def read_holder(remote: Remote) -> dict[str, Any] | None:
    try:
        holder = json.loads(remote.read(HOLDER))
        if isinstance(holder, dict) and isinstance(holder.get("mark"), str):
            return {"who": "another process", **holder}
    except MissingObject:
        return None
    except ValueError:
        pass
    return {"mark": "", "who": "another process"}


def is_alive(remote: Remote) -> bool:
    """Whether some process seems to run it, for a look: by this machine's clock."""
    try:
        return time.time() - remote.modified(HOLDER) < SILENT_S
    except MissingObject:
        return False
