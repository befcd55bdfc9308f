"""Where checkpoints lie: their folders, the manifest that makes one whole, which is newest and good, which go."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from keepstep.checkpoint.untrusted import check_manifest, read_error, read_json, read_text, shown, size_of
from keepstep.errors import CheckpointError, CheckpointUnreadable
from keepstep.standard_json import standard, to_json

if TYPE_CHECKING:
    from keepstep.checkpoint.mirror import Mirror

FORMAT = 1
MANIFEST = "manifest.json"
BEST = "best.json"
WRITING = ".writing-"
"""How the name begins of what is being written: a leftover, once nobody runs."""
LOST_METRICS = "metrics-of-lost-checkpoints-"
"""How the name begins of the metrics of steps that are made again, for no checkpoint of them was good."""
_GONE = f"{WRITING}gone-"
_CHUNK = 1 << 22


@dataclass(frozen=True)
class FileRecord:
    """What a file must be, to be believed."""

    bytes: int
    xxh3: str


@dataclass(frozen=True)
class Manifest:
    """Describes a checkpoint; written last, so that a checkpoint with a manifest is whole."""

    step: int
    epoch: int
    world_size: int
    strategy: str
    files: dict[str, FileRecord] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    created: float = 0.0
    torch: str = ""
    format: int = FORMAT

    def to_json(self) -> str:
        fields = standard(asdict(self))
        return json.dumps({**fields, "xxh3": _checksum(fields)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Raises if it is of another format, or not what was written: what it says decides how a run goes on."""
        raw = json.loads(text)
        if not isinstance(raw, dict):
            raise CheckpointError(f"it is {shown(raw)}; an object was expected")
        is_whole = raw.pop("xxh3", None) == _checksum(raw)
        number = raw.get("format")
        if number != FORMAT:
            # One flipped bit makes a 3 of a 1: what is a newer version's is also whole.
            kind = CheckpointUnreadable if is_whole and type(number) is int and number > FORMAT else CheckpointError
            raise kind(f"its format is {shown(number)}; this keepstep reads format {FORMAT}")
        if not is_whole:
            raise CheckpointError("it is damaged: its own checksum differs")
        check_manifest(raw)  # anybody can make a checksum
        files = {name: FileRecord(**record) for name, record in raw.pop("files").items()}
        metrics = {name: float(value) for name, value in raw.pop("metrics").items()}
        return cls(files=files, metrics=metrics, **raw)


class Store:
    """The checkpoints of one run, in a folder."""

    def __init__(self, root: Path, keep: int, mirror: Mirror | None = None) -> None:
        """`mirror`: their copies in an object store, which keeps as many as asked; the folder then keeps the newest."""
        self.root, self.keep, self.mirror = root, keep, mirror

    @staticmethod
    def name(step: int) -> str:
        return f"step_{step:08d}"

    def path(self, step: int) -> Path:
        return self.root / self.name(step)

    def steps(self) -> list[int]:
        """Steps that have a committed checkpoint, oldest first."""
        try:
            steps = [step_of(entry.name) for entry in self.root.iterdir()]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:  # not to be taken for a run without checkpoints
            raise read_error(str(self.root), error) from None
        return sorted(step for step in steps if step is not None)

    def begin(self, step: int, nonce: str) -> Path:
        """The folder that workers of one attempt write into together, invisible to readers."""
        folder = self.root / f"{WRITING}{self.path(step).name}-{nonce}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def commit(self, folder: Path, manifest: Manifest) -> Path:
        """Makes a written checkpoint appear, whole: its manifest last, then one rename."""
        write_durably(folder / MANIFEST, manifest.to_json())
        final = self.path(manifest.step)
        if final.exists():  # one that proved unreadable, or it would not be written again
            shutil.rmtree(final)
        sync_folder(folder)
        folder.rename(final)
        sync_folder(self.root)
        return final

    def read_manifest(self, step: int) -> Manifest:
        name, path = self.path(step).name, self.path(step) / MANIFEST
        try:
            path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            raise CheckpointError(f"{name} has no {MANIFEST}") from None
        except OSError as error:
            raise read_error(f"{name}/{MANIFEST}", error) from None
        return parse_manifest(read_text(path), name)

    def fetch(self, step: int) -> None:
        """Completes a checkpoint from the object store, if there is one; one process a machine is enough."""
        if self.mirror is not None:
            self.mirror.fetch(self.path(step))

    def check(self, step: int, part: int = 0, parts: int = 1) -> None:
        """Raises if a file of the checkpoint is missing or not what was written. Workers share the work by `part`."""
        manifest = self.read_manifest(step)
        for name in sorted(manifest.files)[part::parts]:
            expected = manifest.files[name]
            path = self.path(step) / name
            found = size_of(path)
            if found != expected.bytes:
                raise CheckpointError(f"{self.path(step).name}/{name} has {found} bytes; {expected.bytes} were written")
            try:
                is_good = digest(path) == expected.xxh3
            except OSError as error:
                raise read_error(f"{self.path(step).name}/{name}", error) from None
            if not is_good:
                raise CheckpointError(f"{self.path(step).name}/{name} is damaged: its checksum differs")

    def remember_best(self, step: int, metric: str, value: float) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        best = {"step": step, "metric": metric, "value": value}
        write_durably(self.root / BEST, to_json(best))

    def best(self) -> dict[str, Any] | None:
        """The checkpoint with the best metric so far: its step, metric and value."""
        try:
            raw = read_json(self.root / BEST)
            return {"step": int(raw["step"]), "metric": str(raw["metric"]), "value": float(raw["value"])}
        except CheckpointUnreadable:  # to take it for none is to delete the best
            raise
        except (CheckpointError, ValueError, TypeError, KeyError, OverflowError):
            return None

    def set_aside_after(self, step: int) -> None:
        """Renames checkpoints of steps later than `step`, which were found bad: the run will make those steps again.

        They are not deleted: somebody may want to know what befell them, or read them with a newer version.
        """
        best = self.best()
        for later in self.steps():
            if later > step:
                self.path(later).rename(self.root / f"damaged-{self.path(later).name}-{uuid.uuid4().hex[:8]}")
        if best is not None and best["step"] > step:
            (self.root / BEST).unlink()

    def prune(self) -> list[int]:
        """Deletes what is neither among the newest nor the best; returns the steps that went."""
        best = self.best()
        steps = self.steps()
        newest = self.keep if self.mirror is None else 1
        kept = set(steps[-newest:]) | ({best["step"]} if best else set())
        gone = [step for step in steps if step not in kept]
        for step in gone:
            # Renamed first: a reader never meets a checkpoint that is half gone.
            with contextlib.suppress(FileNotFoundError):  # somebody was faster
                self.path(step).rename(self.root / f"{_GONE}{uuid.uuid4().hex[:8]}")
        for doomed in self.root.glob(f"{_GONE}*"):  # also what could not be deleted the last time
            shutil.rmtree(doomed, ignore_errors=True)
        return gone

    def sweep(self) -> None:
        """Deletes what interrupted writes left behind."""
        if self.root.is_dir():
            for entry in self.root.iterdir():
                if entry.name.startswith(WRITING):
                    shutil.rmtree(entry, ignore_errors=True)
                elif entry.name.startswith(f".{BEST}-"):
                    entry.unlink(missing_ok=True)


class FetchingStore(Store):
    """A store whose checkpoints in the object store count as being here, and are, once they are checked."""

    def steps(self) -> list[int]:
        return sorted({*super().steps(), *(self.mirror.steps() if self.mirror is not None else [])})

    def check(self, step: int, part: int = 0, parts: int = 1) -> None:
        self.fetch(step)
        super().check(step, part, parts)


def newest_first(store: Store) -> Iterator[int]:
    """Steps to try to resume from, best candidate first: those of the folder, and those of the object store."""
    there = store.mirror.steps() if store.mirror is not None else []
    return iter(sorted({*store.steps(), *there}, reverse=True))


def parse_manifest(text: str, checkpoint: str) -> Manifest:
    """Raises, with the checkpoint's name, if it is not a manifest to be believed."""
    try:
        return Manifest.from_json(text)
    except CheckpointError as error:
        raise type(error)(f"{checkpoint}/{MANIFEST} cannot be used: {error}") from None
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise CheckpointError(f"{checkpoint}/{MANIFEST} cannot be read: {shown(error)}") from None


def step_of(name: str) -> int | None:
    """The step of a checkpoint's folder, or None for other names."""
    match = re.fullmatch(r"step_([0-9]{8,})", name)
    return int(match[1]) if match else None


def _checksum(fields: dict[str, Any]) -> str:
    return xxhash.xxh3_128(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def digest(path: Path) -> str:
    """The file's checksum (xxh3, 128 bits): finds damage, at memory speed."""
    hasher = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        buffer = bytearray(min(_CHUNK, os.fstat(file.fileno()).st_size + 1))  # making 4 MiB takes longer than 4 KiB
        view = memoryview(buffer)
        while count := file.readinto(buffer):
            hasher.update(view[:count])
    return hasher.hexdigest()


def record(path: Path) -> FileRecord:
    return FileRecord(path.stat().st_size, digest(path))


def write_durably(path: Path, text: str) -> None:
    """Replaces a file's content, whole or not at all, and on the disk when this returns."""
    temporary = path.with_name(f".{path.name}-{uuid.uuid4().hex[:8]}")
    try:
        with temporary.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def sync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


sync_folder = sync_file
"""A folder is synced as a file is: it makes a rename in it last."""
