"""Saves a run: copies its state aside, then writes and commits it, by default while training goes on."""

from __future__ import annotations

import errno
import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from keepstep.checkpoint.store import FileRecord, Manifest, Store, record, sync_file, write_durably
from keepstep.checkpoint.tree import Tensors, take_apart
from keepstep.checkpoint.untrusted import JSON_LIMIT
from keepstep.errors import CheckpointError, RunFolderError

STATE = "state.json"


class Saver:
    """At most one save is being written at a time: a second waits for it, so that nothing piles up."""

    def __init__(
        self,
        store: Store,
        rank: int,
        group: dist.ProcessGroup | None,
        nonce: str,
        in_background: bool,
        on_commit: Callable[[Manifest, float], None],
    ) -> None:
        self._store, self._rank, self._group, self._nonce = store, rank, group, nonce
        self._in_background, self._on_commit = in_background, on_commit
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._snapshot: Any = None
        self._warming: threading.Thread | None = None
        self._steps = set(store.steps())
        """Steps that are saved or being saved, the same set on every worker."""

    def warm_up(self, state: dict[str, Any] | None) -> None:
        """Does beside the first steps what the first save would else stop for: importing DCP, which takes half a
        second, and, with a `state` of the kind that will be saved, getting the memory to copy it to."""
        tensors: Tensors = {}
        for key, part in (state or {}).items():
            take_apart(part, key, tensors)
        # Not a daemon: one that is torn away in the middle of an import, at exit, aborts the process.
        self._warming = threading.Thread(target=self._warm_up, args=(tensors,), name="keepstep-warm-up")
        self._warming.start()

    def _warm_up(self, tensors: Tensors) -> None:
        from keepstep.checkpoint.dcp import Snapshot

        workers = dist.get_world_size(self._group) if self._group is not None else 1
        snapshot = Snapshot(self._rank, workers)
        snapshot.allocate(tensors)
        self._snapshot = snapshot

    def has(self, step: int) -> bool:
        return step in self._steps

    def forget_after(self, step: int) -> None:
        """The run goes on from `step`, which is saved: on every machine, also where it was fetched to."""
        self._steps = {saved for saved in self._steps if saved < step} | {step}

    def save(
        self,
        manifest: Manifest,
        state: dict[str, Any],
        rank_state: dict[str, Any],
        wait: bool,
        best: tuple[str, float] | None = None,
    ) -> None:
        """Copies the state to host memory, then writes it; collective. `best`: the metric and value it is the best of.

        `state` is the same run-wide state on every worker, or its own shard of it; `rank_state` is this worker's own.
        """
        self.wait()
        tensors: Tensors = {}
        state_json = json.dumps({key: take_apart(part, key, tensors) for key, part in state.items()})
        rank_json = json.dumps(take_apart(rank_state, f"rank_{self._rank}", tensors))
        if len(state_json) > JSON_LIMIT:  # refused when it is saved, not when it is needed
            raise CheckpointError(
                f"the state has {len(state_json)} bytes of values that are no tensors; at most {JSON_LIMIT} can be "
                "read back: let state_dict() return large values as tensors"
            )
        if self._warming is not None:
            self._warming.join()
            self._warming = None
        if self._snapshot is None:
            self._warm_up({})
        self._snapshot.take(tensors)
        self._steps.add(manifest.step)
        if wait or not self._in_background:
            self._write(manifest, state_json, rank_json, best)
            return
        self._thread = threading.Thread(
            target=self._write_beside, args=(manifest, state_json, rank_json, best), name="keepstep-save", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Until the save that is under way is committed; raises what went wrong in it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.raise_error()

    def raise_error(self) -> None:
        """Raises what went wrong in a save beside training, at the first boundary after it."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _write_beside(self, *what: Any) -> None:
        try:
            self._write(*what)
        except Exception as error:  # raised at the next boundary, in the thread that can stop the run
            self._error = error

    def _write(self, manifest: Manifest, state_json: str, rank_json: str, best: tuple[str, float] | None) -> None:
        from keepstep.checkpoint.dcp import write

        started = time.perf_counter()
        try:
            folder = self._store.begin(manifest.step, self._nonce)

            def commit(files: dict[str, FileRecord]) -> None:
                self._commit(folder, manifest, state_json, files)
                if best is not None:
                    self._store.remember_best(manifest.step, *best)
                self._store.prune()
                self._on_commit(manifest, time.perf_counter() - started)

            write(folder, self._snapshot, self._rank, rank_json, self._group, commit)
        except (OSError, CheckpointError, RunFolderError) as error:
            raise self.failure(manifest.step, error) from error
        if self._store.mirror is not None:
            from keepstep.checkpoint.upload import upload

            upload(self._store, self._store.mirror, manifest.step, folder, self._rank, self._group)

    def _commit(self, folder: Path, manifest: Manifest, state_json: str, files: dict[str, FileRecord]) -> None:
        from keepstep.checkpoint.dcp import INDEX

        for name, expected in files.items() if self._store.mirror is None else ():
            if not (folder / name).is_file() or (folder / name).stat().st_size != expected.bytes:
                raise CheckpointError(f"{name} is not in {folder}: --storage must be a folder that all nodes share")
        write_durably(folder / STATE, state_json)
        sync_file(folder / INDEX)
        files = {**files, **{name: record(folder / name) for name in (STATE, INDEX)}}
        self._store.commit(folder, replace(manifest, files=files, created=time.time(), torch=torch.__version__))

    def failure(self, step: int, error: Exception) -> CheckpointError:
        """What went wrong in a save, what there is to go on from, and what to do."""
        try:
            newest = self._store.steps()[-1:]
        except CheckpointError as unreadable:
            newest, kept = [], f"nor can others be seen: {unreadable}"
        else:
            kept = f"the newest good one is step {newest[0]}" if newest else "there is none before it"
        done = "is written, but not what goes with it" if newest == [step] else "could not be written"
        cause = error if isinstance(error, OSError) else error.__cause__
        advice = ""
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
            advice = "; make room, or lower --keep, and start the same command again"
        elif isinstance(cause, PermissionError) or getattr(cause, "errno", None) == errno.EROFS:
            advice = "; make the folder writable, or give another --storage"
        return CheckpointError(f"the checkpoint of step {step} {done} ({error}); {kept}{advice}")
