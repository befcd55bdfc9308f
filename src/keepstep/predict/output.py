"""Where predictions go: a folder or an object store, with a part for each piece, there whole or not at all."""

from __future__ import annotations

import fcntl
import os
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from keepstep.checkpoint.remote import MissingObject, Remote
from keepstep.checkpoint.store import WRITING, sync_file, sync_folder, write_durably
from keepstep.errors import ConfigError
from keepstep.predict.place import READ_ERRORS, Place, absolute
from keepstep.predict.source import Piece

RECORD = "_prediction.json"
"""With an underscore: those who read the folder as one table pass it over."""
_LOCK = ".lock"
_READERS = 16


def part_name(piece: int) -> str:
    return f"part-{piece:06d}.parquet"


def is_part(name: str) -> bool:
    return name.startswith("part-")


class Output(Protocol):
    """A place of parts and of the record."""

    address: str

    def held(self) -> Any:
        """A context in which no other process writes there, as far as it can be known."""

    def names(self) -> set[str]: ...

    def read_record(self) -> str | None: ...

    def write_record(self, text: str) -> None: ...

    def writing(self, name: str) -> Any:
        """A context with the path of a file to write; it takes its place when the context is left without an error."""


def open_output(address: str) -> Output:
    place = absolute(address)
    return StoreOutput(place) if "://" in place else FolderOutput(place)


class FolderOutput:
    """A folder on this machine, or on a disk that all machines share."""

    def __init__(self, address: str) -> None:
        self.address, self._folder = address, Path(address)

    @contextmanager
    def held(self) -> Iterator[None]:
        is_new = not self._folder.exists()
        with self._as_one_line():
            self._folder.mkdir(parents=True, exist_ok=True)
            lock = os.open(self._folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            self._lock(lock)
            for leftover in self._folder.glob(f"{WRITING}*"):  # of a process that was killed
                leftover.unlink(missing_ok=True)
            yield
        finally:
            if is_new and [path.name for path in self._folder.iterdir()] == [_LOCK]:  # it was refused
                (self._folder / _LOCK).unlink()
                self._folder.rmdir()
            os.close(lock)

    def _lock(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{self.address} is being written by another process; wait for it, or stop it") from None

    def names(self) -> set[str]:
        with self._as_one_line():
            return {path.name for path in self._folder.iterdir() if not path.name.startswith(".")}

    def read_record(self) -> str | None:
        try:
            return (self._folder / RECORD).read_text()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ConfigError(f"{self.address}/{RECORD} cannot be read ({error.strerror})") from None

    def write_record(self, text: str) -> None:
        with self._as_one_line():
            write_durably(self._folder / RECORD, text)

    @contextmanager
    def writing(self, name: str) -> Iterator[Path]:
        temporary = self._folder / f"{WRITING}{uuid.uuid4().hex[:8]}-{name}"
        try:
            with self._as_one_line():
                yield temporary
                sync_file(temporary)
                temporary.replace(self._folder / name)
                sync_folder(self._folder)
        finally:
            temporary.unlink(missing_ok=True)

    @contextmanager
    def _as_one_line(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ConfigError(
                f"{self.address} cannot be written ({error.strerror or error}); give another --output"
            ) from None


class StoreOutput:
    """Objects under one address: one appears when its upload is complete, so that none needs to be renamed."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._remote = Remote.open(self.address)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Two processes would only do the same work twice: the parts of both are the same."""
        yield

    def names(self) -> set[str]:
        return set(self._remote.sizes())

    def read_record(self) -> str | None:
        try:
            return self._remote.read(RECORD).decode()
        except MissingObject:
            return None

    def write_record(self, text: str) -> None:
        self._remote.write(RECORD, text.encode())

    @contextmanager
    def writing(self, name: str) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="keepstep-predict-") as folder:
            path = Path(folder) / name
            try:
                yield path
            except OSError as error:
                raise ConfigError(
                    f"{folder} cannot be written ({error.strerror or error}); TMPDIR names another"
                ) from None
            self._remote.put(path, name)


def finished_parts(output: Output, pieces: Iterable[Piece]) -> dict[int, Any]:
    """Piece → schema of the parts that are there, readable and of as many rows as they should."""
    names = output.names()
    place = Place.open(output.address)
    there = [piece for piece in pieces if part_name(piece.number) in names]
    with ThreadPoolExecutor(_READERS) as threads:
        schemas = threads.map(lambda piece: _schema_if_whole(place, piece), there)
        return {piece.number: schema for piece, schema in zip(there, schemas, strict=True) if schema is not None}


def _schema_if_whole(place: Place, piece: Piece) -> Any:
    try:
        with place.open_parquet(f"{place.root}/{part_name(piece.number)}") as part:
            return part.schema_arrow if part.metadata.num_rows == piece.rows else None
    except READ_ERRORS:  # damaged on the disk: it is predicted again
        return None
