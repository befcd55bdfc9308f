"""A run's copy in an object store: checkpoints, whose manifest comes last and goes first, and the run's small files."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from keepstep.checkpoint.remote import MissingObject, Remote
from keepstep.checkpoint.store import (
    BEST,
    LOST_METRICS,
    MANIFEST,
    WRITING,
    FileRecord,
    Manifest,
    Store,
    digest,
    parse_manifest,
    step_of,
    write_durably,
)
from keepstep.checkpoint.untrusted import JSON_LIMIT
from keepstep.errors import CheckpointError, CheckpointUnreadable, StorageError

HOLDER = "holder.json"
RESULT = "result.json"
_CHECKPOINTS = "checkpoints"
_BEST_KEY = f"{_CHECKPOINTS}/{BEST}"
_FILES = ("config.json", "metrics.jsonl", "events.jsonl", "sinks.json", _BEST_KEY)
_SET_ASIDE = "damaged-manifest.json"
_GROWING = re.compile(
    r"logs/[A-Za-z0-9_][A-Za-z0-9_.-]*\.txt|tensorboard/(again_\d+/)?events\.out\.tfevents\.[A-Za-z0-9_.-]+"
)
"""Keys of files that are appended to. Nothing else that a store lists is written here by its name."""


class Mirror:
    """What one process does for its run's copy. The run folder is the cache of the newest."""

    def __init__(self, remote: Remote, folder: Path, holder: Path) -> None:
        """`holder`: the file with the mark of the process that holds this run, on this machine."""
        self.remote, self._folder, self._holder = remote, folder, holder
        self._pushed: dict[str, tuple[int, int]] = {}
        """Key → size and time of the file as it was last uploaded."""
        self._said = False

    # -- small files --------------------------------------------------------------------------------------------------

    def push_files(self) -> None:
        """Uploads the run's settings, metrics, events, logs, result and artifacts, where they have changed."""
        for path in self._small_files():
            key = path.relative_to(self._folder).as_posix()
            with contextlib.suppress(FileNotFoundError):
                found = path.stat()
                mark = (found.st_size, found.st_mtime_ns)
                if self._pushed.get(key) != mark:
                    self.remote.put(path, key)
                    self._pushed[key] = mark

    def fetch_files(self, local_steps: list[int], is_behind: bool = False) -> None:
        """Downloads the small files where this machine lacks them, or where the run has gone on elsewhere."""
        there = self.remote.sizes()
        is_ahead = is_behind or max(_committed(there), default=-1) > max(local_steps, default=-1) or self.has_finished()
        for key in (*_FILES, RESULT):
            if key in there and (is_ahead or not (self._folder / key).exists()):
                self.remote.get(key, self._folder / key)
        # Where this machine began new ones, the next upload would cut the store's short.
        for key in filter(_GROWING.fullmatch, there):
            path = self._folder / key
            if not path.exists() or (is_ahead and path.stat().st_size < there[key]):
                self.remote.get(key, path)

    def has_finished(self) -> bool:
        """Whether the store knows that the run came to its end."""
        try:
            return bool(json.loads(self.remote.read(RESULT)).get("status") == "finished")
        except (MissingObject, ValueError, AttributeError):
            return False

    def _small_files(self) -> Iterable[Path]:
        yield from (self._folder / key for key in _FILES)
        yield from sorted(self._folder.glob(f"{LOST_METRICS}*.jsonl"))
        yield from sorted((self._folder / "logs").glob("*.txt"))
        yield from sorted((self._folder / "tensorboard").rglob("events.out.tfevents.*"))
        artifacts = sorted((self._folder / "artifacts").rglob("*"))
        yield from (path for path in artifacts if path.is_file() and not path.name.startswith(WRITING))
        yield self._folder / RESULT

    # -- checkpoints, from here to there ------------------------------------------------------------------------------

    def upload(self, step_name: str, file: Path) -> None:
        """Uploads one file of a checkpoint."""
        self.remote.put(file, f"{_CHECKPOINTS}/{step_name}/{file.name}")

    def commit(self, checkpoint: Path, keep: int, best: int | None) -> None:
        """Makes an uploaded checkpoint count: all its files are confirmed, then comes the manifest."""
        prefix = f"{_CHECKPOINTS}/{checkpoint.name}"
        text = (checkpoint / MANIFEST).read_text()
        expected = Manifest.from_json(text).files
        found = self._names(prefix)
        for name, record in expected.items():
            if found.get(name) != record.bytes:
                raise StorageError(
                    f"{self.remote.url}/{prefix}/{name} is not what was uploaded: {found.get(name)} bytes"
                )
        # Of an attempt with more workers, say: what the manifest does not name would never be deleted.
        self.remote.delete(*(f"{prefix}/{name}" for name in found if name not in expected and name != MANIFEST))
        self.check_held()
        self.push_files()
        self.remote.write(f"{prefix}/{MANIFEST}", text.encode())
        self._prune(keep, best)

    def publish(self, checkpoint: Path, keep: int, best: int | None) -> None:
        """Uploads a whole checkpoint of this machine, where the store lacks it: the upload had failed, or it was
        damaged there since."""
        text = (checkpoint / MANIFEST).read_text()
        with contextlib.suppress(MissingObject):
            if self.remote.read(f"{_CHECKPOINTS}/{checkpoint.name}/{MANIFEST}") == text.encode():
                return
        for name in Manifest.from_json(text).files:
            self.upload(checkpoint.name, checkpoint / name)
        self.commit(checkpoint, keep, best)

    def check_held(self) -> None:
        """Raises if another machine took the run over while this one was out of reach: then this one must not go on."""
        successor = self.successor()
        if successor is not None:
            raise StorageError(f"{self.remote.url} was taken over by {successor}; this run must not go on")

    def successor(self) -> str | None:
        """Who holds the run in place of the process that held it from this machine."""
        if not self._holder.exists():
            return None
        try:
            holder = json.loads(self.remote.read(HOLDER))
            return None if holder["mark"] == self._holder.read_text() else str(holder["who"])
        except (MissingObject, ValueError, KeyError, TypeError):
            return None

    # -- checkpoints, from there to here ------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """Steps that have a committed checkpoint in the store, oldest first."""
        return _committed(self.remote.sizes(_CHECKPOINTS))

    def fetch(self, checkpoint: Path) -> None:
        """Completes a checkpoint's folder with what the store has.

        Raises CheckpointError if that is damaged, and what is here is not whole by its own manifest either.
        """
        try:
            self._complete(checkpoint)
        except CheckpointUnreadable:
            raise
        except CheckpointError:
            if not _is_whole(checkpoint):
                raise

    def _complete(self, checkpoint: Path) -> None:
        found = self._names(f"{_CHECKPOINTS}/{checkpoint.name}")
        if MANIFEST not in found:
            return  # never committed there: what is here must do
        try:
            text = self._manifest(checkpoint.name, found[MANIFEST])
            for name, record in parse_manifest(text, checkpoint.name).files.items():
                if _problem(checkpoint / name, record) is not None:
                    self._fetch_file(checkpoint, name, record, found.get(name))
        except CheckpointError as error:
            if not (checkpoint / MANIFEST).exists():
                shutil.rmtree(checkpoint, ignore_errors=True)
            raise type(error)(f"{error}, in {self.remote.url}") from None
        write_durably(checkpoint / MANIFEST, text)

    def bytes_of(self, step: int) -> int:
        """What the store holds of a checkpoint."""
        return sum(self._names(f"{_CHECKPOINTS}/{Store.name(step)}").values())

    @contextlib.contextmanager
    def checked_copy(self, step: int) -> Iterator[Store]:
        """A checkpoint as the store has it: every byte is read and checked, one file at a time.

        The copy goes when the block is left; of its tensors, which could fill a disk, only the places are kept.
        Raises CheckpointError if it is damaged there, whatever this machine has of it.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".verifying-", dir=self._folder) as beside:
            checkpoint = Path(beside) / Store.name(step)
            checkpoint.mkdir()
            found = self._names(f"{_CHECKPOINTS}/{checkpoint.name}")
            text = self._manifest(checkpoint.name, found.get(MANIFEST, 0))
            for name, record in parse_manifest(text, checkpoint.name).files.items():
                self._fetch_file(checkpoint, name, record, found.get(name))
                if name.endswith(".safetensors"):
                    _hollow_out(checkpoint / name)
            (checkpoint / MANIFEST).write_text(text)
            yield Store(checkpoint.parent, keep=1)

    def _manifest(self, step_name: str, size: int) -> str:
        if size > JSON_LIMIT:
            raise CheckpointError(f"{step_name}/{MANIFEST} has {size} bytes")
        return self.remote.read(f"{_CHECKPOINTS}/{step_name}/{MANIFEST}").decode(errors="replace")

    def _fetch_file(self, checkpoint: Path, name: str, expected: FileRecord, size: int | None) -> None:
        """`size`: of the object. One of a wrong size is not even fetched."""
        fetched = checkpoint / f".fetched-{name}"  # beside: what is here may be good under its own manifest
        problem = None if size == expected.bytes else _wrong_size(size, expected)
        try:
            for _ in range(2 if problem is None else 0):  # once more: it may have been damaged on the way
                self.remote.get(f"{_CHECKPOINTS}/{checkpoint.name}/{name}", fetched)
                problem = _problem(fetched, expected)
                if problem is None:
                    fetched.replace(checkpoint / name)
                    return
        finally:
            fetched.unlink(missing_ok=True)
        raise CheckpointError(f"{checkpoint.name}/{name} {problem}")

    # -- what goes ----------------------------------------------------------------------------------------------------

    def set_aside_after(self, step: int) -> None:
        """Takes the manifests of later checkpoints, which were found bad, out of the way; their files stay."""
        for later in self.steps():
            if later > step:
                prefix = f"{_CHECKPOINTS}/{Store.name(later)}"
                self.remote.write(f"{prefix}/{_SET_ASIDE}", self.remote.read(f"{prefix}/{MANIFEST}"))
                self.remote.delete(f"{prefix}/{MANIFEST}")
        if not (self._folder / _BEST_KEY).exists():
            self.remote.delete(_BEST_KEY)

    def sweep(self) -> None:
        """Deletes what interrupted uploads and deletions left behind: checkpoints without a manifest."""
        there = self.remote.sizes(_CHECKPOINTS)
        marked = {key.rpartition("/")[0] for key in there if key.endswith((f"/{MANIFEST}", f"/{_SET_ASIDE}"))}
        self.remote.delete(*(key for key in there if _step(key) is not None and key.rpartition("/")[0] not in marked))

    def _prune(self, keep: int, best: int | None) -> None:
        there = self.remote.sizes(_CHECKPOINTS)
        steps = _committed(there)
        gone = set(steps[:-keep]) - {best}
        try:
            # The manifests first: a reader never takes a checkpoint that is half gone for a good one.
            self.remote.delete(*(f"{_CHECKPOINTS}/{Store.name(step)}/{MANIFEST}" for step in sorted(gone)))
            self.remote.delete(*(key for key in there if _step(key) in gone and not key.endswith(f"/{MANIFEST}")))
        except StorageError as error:  # the new checkpoint is safe: no reason to end the run
            if not self._said:
                print(f"keepstep: old checkpoints stay: {error}", file=sys.stderr, flush=True)
            self._said = True

    def _names(self, prefix: str) -> dict[str, int]:
        return {key.rpartition("/")[2]: size for key, size in self.remote.sizes(prefix).items()}


def _step(key: str) -> int | None:
    """The step of an object that is part of a checkpoint."""
    parts = key.split("/")
    return step_of(parts[1]) if len(parts) == 3 and parts[0] == _CHECKPOINTS else None


def _committed(keys: Iterable[str]) -> list[int]:
    steps = (_step(key) for key in keys if key.endswith(f"/{MANIFEST}"))
    return sorted(step for step in steps if step is not None)


def _is_whole(checkpoint: Path) -> bool:
    step = step_of(checkpoint.name)
    assert step is not None
    try:
        Store(checkpoint.parent, keep=1).check(step)
    except CheckpointError:
        return False
    return True


def _hollow_out(path: Path) -> None:
    """Leaves of a safetensors file its size and its header, which begins with its own length."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
    os.truncate(path, min(8 + header, size))
    os.truncate(path, size)  # sparse: it takes no room


def _problem(path: Path, expected: FileRecord) -> str | None:
    size = path.stat().st_size if path.is_file() else None
    if size != expected.bytes:
        return _wrong_size(size, expected)
    return None if digest(path) == expected.xxh3 else "is damaged: its checksum differs"


def _wrong_size(size: int | None, expected: FileRecord) -> str:
    return "is missing" if size is None else f"has {size} bytes; {expected.bytes} were written"
