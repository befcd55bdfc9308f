"""Where checkpoints lie: their folders, the manifest that makes one whole, which is newest and good, which go."""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from keepstep.errors import CheckpointError

FORMAT = 1
MANIFEST = "manifest.json"
_BEST = "best.json"
_TEMPORARY = ".writing-"
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
    metrics: dict[str, Any] = field(default_factory=dict)
    created: float = 0.0
    torch: str = ""
    keepstep: str = ""
    format: int = FORMAT

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        raw = json.loads(text)
        if raw.get("format") != FORMAT:
            raise CheckpointError(f"its format is {raw.get('format')!r}; this keepstep reads format {FORMAT}")
        files = {name: FileRecord(**record) for name, record in raw.pop("files").items()}
        return cls(files=files, **raw)


class Store:
    """The checkpoints of one run, in a folder."""

    def __init__(self, root: Path, keep: int) -> None:
        self.root, self._keep = root, keep

    def path(self, step: int) -> Path:
        return self.root / f"step_{step:08d}"

    def steps(self) -> list[int]:
        """Steps that have a committed checkpoint, oldest first."""
        if not self.root.is_dir():
            return []
        matches = (re.fullmatch(r"step_(\d{8,})", entry.name) for entry in self.root.iterdir())
        return sorted(int(match[1]) for match in matches if match)

    def begin(self, step: int, nonce: str) -> Path:
        """The folder that workers of one attempt write into together, invisible to readers."""
        folder = self.root / f"{_TEMPORARY}{self.path(step).name}-{nonce}"
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
        path = self.path(step) / MANIFEST
        try:
            return Manifest.from_json(path.read_text())
        except FileNotFoundError:
            raise CheckpointError(f"{self.path(step).name} has no {MANIFEST}") from None
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise CheckpointError(f"{self.path(step).name}/{MANIFEST} cannot be read: {error}") from None

    def check(self, step: int, part: int = 0, parts: int = 1) -> None:
        """Raises if a file of the checkpoint is missing or not what was written. Workers share the work by `part`."""
        manifest = self.read_manifest(step)
        for name in sorted(manifest.files)[part::parts]:
            expected = manifest.files[name]
            if Path(name).name != name:
                raise CheckpointError(f"{self.path(step).name}: the manifest names a file outside it: {name!r}")
            path = self.path(step) / name
            if not path.is_file():
                raise CheckpointError(f"{self.path(step).name}/{name} is missing")
            found = path.stat().st_size
            if found != expected.bytes:
                raise CheckpointError(f"{self.path(step).name}/{name} has {found} bytes; {expected.bytes} were written")
            if digest(path) != expected.xxh3:
                raise CheckpointError(f"{self.path(step).name}/{name} is damaged: its checksum differs")

    def remember_best(self, step: int, metric: str, value: float) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        write_durably(self.root / _BEST, json.dumps({"step": step, "metric": metric, "value": value}))

    def best(self) -> dict[str, Any] | None:
        """The checkpoint with the best metric so far: its step, metric and value."""
        try:
            best: dict[str, Any] = json.loads((self.root / _BEST).read_text())
        except (FileNotFoundError, ValueError):
            return None
        return best

    def forget_after(self, step: int) -> None:
        """Drops checkpoints and a best of steps later than `step`: a resumed run will make them again."""
        for later in self.steps():
            if later > step:
                shutil.rmtree(self.path(later), ignore_errors=True)
        best = self.best()
        if best is not None and best["step"] > step:
            (self.root / _BEST).unlink()

    def prune(self) -> list[int]:
        """Deletes what is neither among the newest nor the best; returns the steps that went."""
        best = self.best()
        kept = set(self.steps()[-self._keep :]) | ({best["step"]} if best else set())
        gone = [step for step in self.steps() if step not in kept]
        for step in gone:
            # Renamed first: a reader never meets a checkpoint that is half gone.
            doomed = self.root / f"{_TEMPORARY}gone-{uuid.uuid4().hex[:8]}"
            self.path(step).rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)
        return gone

    def sweep(self) -> None:
        """Deletes what interrupted writes left behind."""
        if self.root.is_dir():
            for entry in self.root.iterdir():
                if entry.name.startswith(_TEMPORARY):
                    shutil.rmtree(entry, ignore_errors=True)


def newest_first(store: Store) -> Iterator[int]:
    """Steps to try to resume from, best candidate first."""
    return reversed(store.steps())


def digest(path: Path) -> str:
    """The file's checksum (xxh3, 128 bits): finds damage, at memory speed."""
    hasher = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        buffer = bytearray(_CHUNK)
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
