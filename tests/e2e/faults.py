"""A small training job, and the faults that it is made to meet: at one operation of one save, or in what it reads.

Run as a module it is a zygote: it has imported everything, reads jobs as JSON lines, and forks a process for each.
"""

from __future__ import annotations

import builtins
import errno
import gc
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

SAVE = 6
"""The step whose save the faults are in: the third one, the first that also deletes."""
BACK_S = 86_400.0
"""How far the clock goes back."""
STORE = "local"
"""The protocol of an object store that is a folder, which a killed process leaves as it is."""
SENSIBLE = {
    # A disk that is full does not mind deleting; a lost permission does not take away a file that is open.
    "ENOSPC": ("open", "write", "fsync", "rename", "mkdir", "upload"),
    "EACCES": ("open", "rename", "mkdir", "unlink", "upload", "delete"),
    "SIGKILL": ("open", "write", "fsync", "rename", "mkdir", "unlink", "upload", "delete"),
}


def train() -> None:
    """Nine steps in three epochs: saved within an epoch, and at an epoch's end."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    import keepstep

    run = keepstep.start()
    model = nn.Sequential(nn.Linear(8, 64, bias=False), nn.Dropout(0.1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data: Any = TensorDataset(torch.arange(48.0).reshape(6, 8) / 48)
    model, optimizer, loader = run.prepare(model, optimizer, DataLoader(data, 2, shuffle=True))
    for epoch in run.epochs(3):
        for (x,) in run.steps(loader):
            loss = (model(x + torch.rand(()) / 10) ** 2).mean()
            run.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss=loss)
            if "FAULTS_PAUSE" in os.environ and run.step == 4:
                _pause(Path(os.environ["FAULTS_PAUSE"]))
        run.log(score=(1, 2, 0)[epoch])  # --keep-best score:max is of steps 3 and 6


def _pause(mark: Path) -> None:
    """Says who is here, and waits until that is taken away."""
    mark.write_text(str(os.getpid()))
    while mark.exists():
        time.sleep(0.01)


class Injector:
    """Counts the operations of one save, and has one of them fail."""

    def __init__(self, fault: str | None, at: int, lasting: bool, root: str) -> None:
        """`lasting`: from then on everything of the kind fails under `root`, as on a disk that stays full."""
        self._fault, self._at, self._lasting, self._root = fault, at, lasting, root
        self._thread = threading.local()
        self._tripped = False
        self.operations: list[tuple[str, str]] = []
        self.before: list[int] = []
        """The steps that were committed when the save began."""

    def within(self, is_it: Callable[..., bool], call: Callable[..., Any]) -> Callable[..., Any]:
        """A function whose operations count, in the thread that calls it."""

        def gated(*args: Any, **kwargs: Any) -> Any:
            outer = getattr(self._thread, "counts", False)
            self._thread.counts = is_it(*args)
            try:
                return call(*args, **kwargs)
            finally:
                self._thread.counts = outer

        return gated

    @property
    def is_next(self) -> bool:
        """Whether the next operation of this thread is the one."""
        counts = getattr(self._thread, "counts", False)
        return bool(self._fault and counts and len(self.operations) == self._at)

    def operation(self, kind: str, file: Any) -> None:
        name = os.readlink(f"/proc/self/fd/{file}") if isinstance(file, int) else os.fspath(file)
        lasts = self._tripped and self._lasting and kind in SENSIBLE[self._fault or ""]
        # A name within an open folder is one of rmtree's.
        fails = self.is_next or (lasts and (name.startswith(self._root) or not name.startswith("/")))
        if getattr(self._thread, "counts", False):
            self.operations.append((kind, name))
        if not fails:
            return
        self._tripped = True
        if self._fault == "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        number = getattr(errno, self._fault or "")
        raise OSError(number, os.strerror(number), name)


def install(injector: Injector) -> None:
    """Puts the injector between keepstep and the system."""
    for name, kind in (("rename", "rename"), ("replace", "rename"), ("mkdir", "mkdir"), ("unlink", "unlink"),
                       ("rmdir", "unlink"), ("fsync", "fsync")):  # fmt: skip
        setattr(os, name, _announced(injector, kind, getattr(os, name)))
    _count_writes(injector)
    _count_uploads(injector)

    from keepstep.checkpoint.saver import Saver
    from keepstep.checkpointer import Checkpointer

    def begins(checkpointer: Any, place: Any, *_: Any) -> bool:
        if place.step == SAVE and not injector.operations:
            checkpointer.wait()  # the save before it counts as committed
            injector.before = checkpointer._store.steps()
        return bool(place.step == SAVE)

    setattr(Checkpointer, "save", injector.within(begins, Checkpointer.save))  # noqa: B010
    is_it = lambda saver, manifest, *_: manifest.step == SAVE  # noqa: E731
    setattr(Saver, "_write", injector.within(is_it, Saver._write))  # noqa: B010


def _announced(injector: Injector, kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def announced(*args: Any, **kwargs: Any) -> Any:
        injector.operation(kind, args[1] if kind == "rename" else args[0])
        # No power is cut here: what was written is there, synced or not, and syncing takes most of the time.
        return None if kind == "fsync" else call(*args, **kwargs)

    return announced


def _count_writes(injector: Injector) -> None:
    class Raw(io.FileIO):
        def write(self, data: Any) -> int:
            if injector.is_next:  # neither a full disk nor a killed process ends at the end of a write
                super().write(memoryview(data).cast("B")[: memoryview(data).nbytes // 2])
            injector.operation("write", self.name)
            return super().write(data)

    unhooked = io.open

    def opened(file: Any, mode: str = "r", buffering: int = -1, *args: Any, **kwargs: Any) -> Any:
        if isinstance(file, int) or not set(mode) & set("wax+"):
            return unhooked(file, mode, buffering, *args, **kwargs)
        injector.operation("open", file)
        raw = Raw(file, mode.replace("b", "").replace("t", ""))
        if buffering == 0:
            return raw
        buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, *args, **kwargs)

    io.open = builtins.open = opened  # type: ignore[assignment]


def _count_uploads(injector: Injector) -> None:
    from fsspec import register_implementation
    from fsspec.implementations.local import LocalFileSystem

    class Objects(LocalFileSystem):  # type: ignore[misc]
        """What an object store is to keepstep: objects appear whole."""

        protocol = STORE

        def __init__(self, **options: Any) -> None:
            super().__init__(**{**options, "auto_mkdir": True})

        def _as_one(self, kind: str, path: str, call: Callable[[], Any]) -> Any:
            injector.operation(kind, path)
            return injector.within(lambda: False, call)()  # one operation, however a folder does it

        def put_file(self, lpath: str, rpath: str, **options: Any) -> Any:
            return self._as_one("upload", rpath, lambda: LocalFileSystem.put_file(self, lpath, rpath))

        def pipe_file(self, path: str, value: bytes, **options: Any) -> Any:
            return self._as_one("upload", path, lambda: LocalFileSystem.pipe_file(self, path, value))

        def rm_file(self, path: str) -> Any:
            return self._as_one("delete", path, lambda: LocalFileSystem.rm_file(self, path))

    register_implementation(STORE, Objects, clobber=True)


def make_unreadable(what: str, number: int) -> None:
    """From here on `what` (files in checkpoints, their folders, the list of them, best.json) cannot be read."""

    def hit(path: object) -> bool:
        text = os.fsdecode(path) if isinstance(path, str | os.PathLike) else ""
        parts = text.split("checkpoints/step_")
        return {
            "files": len(parts) > 1 and text.endswith((".safetensors", ".json")),
            "folders": len(parts) > 1 and "/" in parts[-1],
            "list": text.endswith("/checkpoints"),
            "best": text.endswith("/best.json"),
        }[what]

    def failing(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(path: Any, *args: Any, **kwargs: Any) -> Any:
            if hit(path):
                raise OSError(number, os.strerror(number), str(path))
            return call(path, *args, **kwargs)

        return called

    os.open, io.open = failing(os.open), failing(io.open)  # type: ignore[assignment]
    if what in ("folders", "list"):
        os.stat, os.lstat, os.listdir = failing(os.stat), failing(os.lstat), failing(os.listdir)  # type: ignore[assignment]


def set_clock(when: str) -> None:
    """Back by a day: from the start, or from the third save on."""
    from keepstep.checkpointer import Checkpointer

    real, save, offset = time.time, Checkpointer.save, [BACK_S if when == "start" else 0.0]

    def saving(checkpointer: Any, place: Any, *args: Any, **kwargs: Any) -> None:
        if place.step >= SAVE:
            offset[0] = BACK_S
        save(checkpointer, place, *args, **kwargs)

    time.time = lambda: real() - offset[0]
    setattr(Checkpointer, "save", saving)  # noqa: B010


def work(job: dict[str, Any]) -> int:
    """One job, in a process of its own; returns its exit code."""
    os.environ["KEEPSTEP_CACHE"] = job["cache"]
    if "pause" in job:
        os.environ["FAULTS_PAUSE"] = job["pause"]
    injector = Injector(job.get("fault"), job.get("at", -1), job.get("lasting", False), job["root"])
    install(injector)
    if "unreadable" in job:
        make_unreadable(*job["unreadable"])
    if "clock" in job:
        set_clock(job["clock"])

    from keepstep.cli import main

    flags = ["--name", "a", "--storage", job["storage"], "--checkpoint-every", "2", "--keep", "2", "--device", "cpu"]
    code = main(["run", *flags, *job.get("flags", []), "e2e.faults:train"])
    if "trace" in job:
        trace = {"operations": injector.operations, "before": injector.before}
        descriptor = os.open(job["trace"], os.O_WRONLY | os.O_CREAT)
        os.write(descriptor, json.dumps(trace).encode())
    return code


def fork(job: dict[str, Any]) -> dict[str, Any]:
    log = Path(job["log"])
    child = os.fork()
    if child == 0:
        code = 70
        try:
            descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            code = work(job)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return {"code": os.waitstatus_to_exitcode(status), "output": log.read_text()}


def serve() -> None:
    warm_up()
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    for line in requests:
        answers.write(json.dumps(fork(json.loads(line))) + "\n")
        answers.flush()


def warm_up() -> None:
    """Imports what a job will need. No thread may be started: a fork takes none of them along."""
    import torch
    from torch import nn

    import keepstep.checkpoint.contents
    import keepstep.checkpoint.upload
    import keepstep.cli
    import keepstep.holder
    import keepstep.supervisor  # noqa: F401

    torch.set_num_threads(1)
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.zeros(2)
    torch.optim.SGD([parameter], lr=0.1, momentum=0.9).step()
    gc.collect()
    gc.freeze()  # or each child's collector would write to, and so copy, every page


class Zygote:
    """The other end: has jobs run, one at a time."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": ""}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "e2e.faults"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[1],
            env=environment,
        )

    def run(self, **job: Any) -> tuple[int, str]:
        """The exit code (-9: killed) and all that was printed."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        return answer["code"], answer["output"]

    def close(self) -> None:
        self._process.communicate()


if __name__ == "__main__":
    serve()
