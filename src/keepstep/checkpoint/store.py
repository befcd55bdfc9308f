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
from typing import Any

import xxhash

from keepstep.errors import CheckpointError
from keepstep.standard_json import standard, to_json

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
        if raw.get("format") != FORMAT:
            raise CheckpointError(f"its format is {raw.get('format')!r}; this keepstep reads format {FORMAT}")
        outside = [name for name in raw["files"] if Path(name).name != name]
        if outside:
            raise CheckpointError(f"it names a file outside the checkpoint: {outside[0]!r}")
        if raw.pop("xxh3", None) != _checksum(raw):
            raise CheckpointError("it is damaged: its own checksum differs")
        files = {name: FileRecord(**record) for name, record in raw.pop("files").items()}
        metrics = {name: float(value) for name, value in raw.pop("metrics").items()}
        return cls(files=files, metrics=metrics, **raw)


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
        matches = (re.fullmatch(r"step_([0-9]{8,})", entry.name) for entry in self.root.iterdir())
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
        name = self.path(step).name
        try:
            return Manifest.from_json((self.path(step) / MANIFEST).read_text())
        except FileNotFoundError:
            raise CheckpointError(f"{name} has no {MANIFEST}") from None
        except CheckpointError as error:
            raise CheckpointError(f"{name}/{MANIFEST} cannot be used: {error}") from None
        except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
            raise CheckpointError(f"{name}/{MANIFEST} cannot be read: {error!r}") from None

    def check(self, step: int, part: int = 0, parts: int = 1) -> None:
        """Raises if a file of the checkpoint is missing or not what was written. Workers share the work by `part`."""
        manifest = self.read_manifest(step)
        for name in sorted(manifest.files)[part::parts]:
            expected = manifest.files[name]
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
        best = {"step": step, "metric": metric, "value": value}
        write_durably(self.root / _BEST, to_json(best))

    def best(self) -> dict[str, Any] | None:
        """The checkpoint with the best metric so far: its step, metric and value."""
        try:
            raw = json.loads((self.root / _BEST).read_text())
            return {"step": int(raw["step"]), "metric": str(raw["metric"]), "value": float(raw["value"])}
        except (FileNotFoundError, ValueError, TypeError, KeyError):
            return None

    def set_aside_after(self, step: int) -> None:
        """Renames checkpoints of steps later than `step`, which were found bad: the run will make those steps again.

        They are not deleted: somebody may want to know what befell them, or read them with a newer version.
        """
        for later in self.steps():
            if later > step:
                self.path(later).rename(self.root / f"damaged-{self.path(later).name}-{uuid.uuid4().hex[:8]}")
        best = self.best()
        if best is not None and best["step"] > step:
            (self.root / _BEST).unlink()

    def prune(self) -> list[int]:
        """Deletes what is neither among the newest nor the best; returns the steps that went."""
        best = self.best()
        steps = self.steps()
        kept = set(steps[-self._keep :]) | ({best["step"]} if best else set())
        gone = [step for step in steps if step not in kept]
        for step in gone:
            self._drop(step)
        return gone

    def _drop(self, step: int) -> None:
        # Renamed first: a reader never meets a checkpoint that is half gone.
        doomed = self.root / f"{_TEMPORARY}gone-{uuid.uuid4().hex[:8]}"
        with contextlib.suppress(FileNotFoundError):  # somebody was faster
            self.path(step).rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)

    def sweep(self) -> None:
        """Deletes what interrupted writes left behind."""
        if self.root.is_dir():
            for entry in self.root.iterdir():
                if entry.name.startswith(_TEMPORARY):
                    shutil.rmtree(entry, ignore_errors=True)
                elif entry.name.startswith(f".{_BEST}-"):
                    entry.unlink(missing_ok=True)


def newest_first(store: Store) -> Iterator[int]:
    """Steps to try to resume from, best candidate first."""
    return reversed(store.steps())


def _checksum(fields: dict[str, Any]) -> str:
    return xxhash.xxh3_128(json.dumps(fields, sort_keys=True).encode()).hexdigest()


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
