"""`fingerprints/rank_R.jsonl` of a run folder: a line a completed step, there before the step is saved."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import nn

from keepstep.context import Context
from keepstep.data.loader import Batch
from keepstep.fingerprints.hashing import DIGITS, digest, indices_digest, samples_digest
from keepstep.fingerprints.user_code import user_files
from keepstep.fingerprints.variables import Variables
from keepstep.seeding import capture_rng
from keepstep.state import TrainingState

FOLDER = "fingerprints"
KINDS = ("samples", "rng", "weights", "buffers", "optimizer", "scheduler", "scaler", "tracked")
"""What is compared, in the order in which one brings on the other."""
__all__ = ["DIGITS", "FOLDER", "KINDS", "Fingerprints", "this_machine"]


def this_machine() -> str:
    """Where a process id means something."""
    namespace = ""
    with suppress(OSError):
        namespace = str(Path("/proc/self/ns/pid").readlink())
    return f"{socket.gethostname()} {namespace}".strip()


class Fingerprints:
    """One worker's. What it hashes is what a checkpoint would hold, as this worker holds it: its own shards."""

    def __init__(self, context: Context, state: TrainingState) -> None:
        self._state = state
        folder = context.folder.path / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        # Unbuffered: a line is one write, and there when this worker is killed right after it.
        self._file = (folder / f"rank_{context.rank}.jsonl").open("ab+", buffering=0)
        self._variables = Variables(self._is_saved)
        self._layout: list[list[str]] = []
        self._batches: list[dict[str, Any]] = []
        self._before: dict[str, str] = {}
        self._has_files = False
        self._line(
            {
                "start": time.time(),
                "pid": os.getpid(),
                "machine": this_machine(),
                "world_size": context.world_size,
                "device": context.device.type,
                "strategy": context.strategy.name,
            }
        )

    def begin(self, batch: Batch) -> None:
        """A batch is about to be handed out; its step begins."""
        self._batches = []
        self.also(batch)
        self._before = self._variables.look()

    def also(self, batch: Batch) -> None:
        """A batch of a second loader, within the step."""
        self._batches.append(
            {
                "content": digest(batch.data),
                "count": batch.num_samples,
                "samples": samples_digest(batch.data, batch.num_samples),
                "indices": None if batch.indices is None else indices_digest(batch.indices),
            }
        )

    def write(self, step: int, epoch: int) -> None:
        """The step is complete. Collective where a strategy's state is."""
        if not self._has_files:
            self._has_files = True
            self._line({"files": user_files()})
        entries = list(self._entries())
        layout = [[kind, name] for kind, name, _ in entries]
        if layout != self._layout:
            self._layout = layout
            self._line({"layout": layout})
        self._line(
            {
                "step": step,
                "epoch": epoch,
                "batches": self._batches,
                "rng": {name: digest(state) for name, state in capture_rng().items()},
                "state": "".join(digest(value) for _, _, value in entries),
                "variables": self._before,
            }
        )

    def _entries(self) -> Iterator[tuple[str, str, Any]]:
        """(kind, name, value) of every piece of the state."""
        state = self._state
        for name, model in state.models.items():
            saved = model.state()
            yield from (("weights", f"{name}/{key}", value) for key, value in saved.items())
            yield from (("buffers", f"{name}/{key}", value) for key, value in _unsaved_buffers(model.module, saved))
        for name, optimizer in state.optimizers.items():
            for key, value in _leaves(optimizer.state_dict(), name):
                yield "optimizer", key, value
        for name, scheduler in state.schedulers.items():
            yield "scheduler", name, scheduler.state_dict()
        if state.scaler is not None:
            yield "scaler", "scaler", state.scaler.state_dict()
        for name, value in state.tracked.items():
            for key, part in _leaves(value.state_dict(), name):
                yield "tracked", key, part

    def _is_saved(self, value: Any) -> bool:
        state = self._state
        saved: tuple[Any, ...] = (
            *(model.module for model in state.models.values()),
            *(optimizer.optimizer for optimizer in state.optimizers.values()),
            *state.schedulers.values(),
            *state.tracked.values(),
        )
        return any(value is known for known in saved)

    def _line(self, entry: dict[str, Any]) -> None:
        data = json.dumps(entry).encode() + b"\n"
        if "start" in entry and self._file.seek(0, os.SEEK_END):
            self._file.seek(-1, os.SEEK_END)
            if self._file.read(1) != b"\n":  # the kernel cut a line short as it killed who wrote it
                data = b"\n" + data
        while data:
            data = data[self._file.write(data) :]


def _unsaved_buffers(module: nn.Module, saved: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Buffers with persistent=False: no state_dict has them, so no checkpoint does."""
    for name, buffer in module.named_buffers():
        plain = name.replace("_fsdp_wrapped_module.", "")
        if plain not in saved:
            yield plain, buffer


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, part in value.items():
            yield from _leaves(part, f"{path}/{key}")
    elif isinstance(value, (list, tuple)) and any(isinstance(part, dict) for part in value):
        for number, part in enumerate(value):
            yield from _leaves(part, f"{path}/{number}")
    else:
        yield path, value
