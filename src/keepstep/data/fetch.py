"""Finds a data set's files where the user said, in $KEEPSTEP_DATA or in the cache, and downloads what is public."""

from __future__ import annotations

import fcntl
import hashlib
import os
import sys
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import BinaryIO, NamedTuple

from keepstep.errors import DataError

_TIMEOUT_S = 60.0
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class FileSet:
    """One form in which a data set comes: all of its files, in one folder."""

    files: Mapping[str, str | None]
    """File name to md5, which guards downloads; None where the file is served nowhere."""
    urls: tuple[str, ...] = ()
    """Public folders that serve these files, tried in order; empty: never downloaded."""


class Located(NamedTuple):
    """Where a data set was found, and in which of the forms that were asked for."""

    folder: Path
    form: FileSet


def locate(name: str, *forms: FileSet, data: str | os.PathLike[str] | None = None) -> Located:
    """Returns the first folder that holds all the files of one of the forms; the first form wins within a folder.

    Looked for in `data` (the folder itself, or `data/name`) and nowhere else when it is given. Otherwise in
    `$KEEPSTEP_DATA` likewise, then in the cache, which the first form with a public address is downloaded into.
    Files a user provides are taken as they are; only downloads are checked by md5.
    """
    if data is not None:
        places = _folders(name, data)
        found = _search(forms, places)
        if found is None:
            raise DataError(
                f"{_missing(name, forms, places)}. Name the folder that holds them, or leave it out to "
                "use $KEEPSTEP_DATA, the cache or a download"
            )
        return found
    environment = os.environ.get("KEEPSTEP_DATA")
    places = [*(_folders(name, environment) if environment else ()), cache_folder(name)]
    return _search(forms, places) or _download(name, forms, places)


def cache_folder(name: str) -> Path:
    """The folder for what keepstep downloads or derives for the data set `name`; it may not exist yet."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "keepstep" / name


@contextmanager
def locked_cache(name: str) -> Iterator[Path]:
    """The cache folder of `name`, held by one process at a time; the others wait, and should then look again."""
    folder = cache_folder(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # The lock file stays: removing it would let two processes lock two different files of that name.
        lock = (folder / ".lock").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError as error:
        raise DataError(
            f"the cache folder {folder} cannot be used ({error}). Set XDG_CACHE_HOME to a folder that can be written"
        ) from error
    with lock:
        yield folder


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write that appears under its name only when it is complete; for one writer at a time."""
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _folders(name: str, data: str | os.PathLike[str]) -> list[Path]:
    folder = Path(data).expanduser()
    return [folder, folder / name]


def _search(forms: Sequence[FileSet], places: Sequence[Path]) -> Located | None:
    for folder in places:
        for form in forms:
            if all((folder / file).is_file() for file in form.files):
                return Located(folder, form)
    return None


def _download(name: str, forms: Sequence[FileSet], places: Sequence[Path]) -> Located:
    looked = _missing(name, forms, places)
    form = next((form for form in forms if form.urls), None)
    if form is None:
        raise DataError(f"{looked}, and they are not public. Set KEEPSTEP_DATA to the folder that holds them")
    with locked_cache(name) as folder:
        for file, md5 in form.files.items():
            if (folder / file).is_file():  # another process may have fetched it while this one waited
                continue
            print(f"keepstep: downloading {file} of {name} to {folder}", file=sys.stderr, flush=True)
            failures = _fetch_from_any(form.urls, folder / file, md5)
            if failures:
                raise DataError(
                    f"{looked}, and the download failed ({'; '.join(failures)}). Put the files into {folder}, or set "
                    "KEEPSTEP_DATA to the folder that holds them"
                )
    return Located(folder, form)


def _fetch_from_any(urls: Sequence[str], path: Path, md5: str | None) -> list[str]:
    """Tries one address after the other: what went wrong at each, or nothing if one worked."""
    failures: list[str] = []
    for base in urls:
        url = f"{base.rstrip('/')}/{path.name}"
        try:
            _fetch(url, path, md5)
            return []
        except (OSError, HTTPException, DataError) as error:
            failures.append(f"{url}: {str(error) or type(error).__name__}")
    return failures


def _fetch(url: str, path: Path, md5: str | None) -> None:
    digest = hashlib.md5(usedforsecurity=False)
    with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as response, whole_file(path) as file:
        while chunk := response.read(_CHUNK_BYTES):
            digest.update(chunk)
            file.write(chunk)
        if digest.hexdigest() != md5:  # inside whole_file, so that a bad download never gets its name
            raise DataError(f"md5 is {digest.hexdigest()}, expected {md5}")


def _missing(name: str, forms: Sequence[FileSet], places: Sequence[Path]) -> str:
    wanted = " or ".join(f"[{', '.join(form.files)}]" for form in forms)
    return f"{name}: looked for {wanted} in {' and '.join(map(str, places))}: not there"
