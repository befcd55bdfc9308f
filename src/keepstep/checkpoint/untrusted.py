"""Reads what may come from anybody: only regular files, no more of them than was declared, and never code."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
from pathlib import Path
from typing import Any

from keepstep.errors import CheckpointError, CheckpointUnreadable

JSON_LIMIT = 1 << 30
"""The most bytes a checkpoint's JSON may have: values that are no tensors. A sparse file costs nothing to send."""
_LARGEST = (1 << 63) - 1
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")
_NOT_WHAT_WAS_WRITTEN = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO)
_LATEST = 253402300799.0
"""The end of the year 9999: later times have no date."""


def shown(value: object) -> str:
    """Somebody else's text for one line of ours: short, and free of control characters."""
    text = ascii(value)
    return text if len(text) <= 80 else text[:77] + "..."


def file_name(name: object) -> str:
    """The name of a file in the checkpoint's own folder, and nothing that any system reads as a path."""
    if not isinstance(name, str) or not _FILE_NAME.fullmatch(name):
        raise CheckpointError(f"it names a file outside the checkpoint: {shown(name)}")
    return name


def integer(value: object, what: str, least: int = 0) -> int:
    """A number that fits into 64 bits; neither `true` nor 3.0 is one."""
    if type(value) is not int or not least <= value <= _LARGEST:
        raise CheckpointError(f"{what} is {shown(value)}; a whole number from {least} was expected")
    return value


def read_error(where: str, error: OSError) -> CheckpointError:
    """What the system says of a file: that it is not the one that was written, or only that it cannot be read now."""
    number = error.errno
    if number is None and (named := re.search(r"os error (\d+)", str(error))):  # how Rust packages say it
        number = int(named[1])
    gone = number is None or number in _NOT_WHAT_WAS_WRITTEN or isinstance(error, FileNotFoundError)
    kind = CheckpointError if gone else CheckpointUnreadable
    return kind(f"{where} cannot be read: {error.strerror or shown(str(error))}")


def size_of(path: Path) -> int:
    """The bytes of a regular file. A link could lead out of the folder, and a pipe would be waited for for ever."""
    where = f"{path.parent.name}/{path.name}"
    try:
        found = path.lstat()
    except FileNotFoundError:
        raise CheckpointError(f"{where} is missing") from None
    except OSError as error:
        raise read_error(where, error) from None
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(f"{where} is not a regular file; a checkpoint has no links, folders or devices in it")
    return found.st_size


def read_text(path: Path, declared: int | None = None) -> str:
    """The content of a text file of the declared size, which is looked at before anything is read."""
    where = f"{path.parent.name}/{path.name}"
    size = size_of(path)
    if declared is not None and size != declared:
        raise CheckpointError(f"{where} has {size} bytes; {declared} were written")
    if size > JSON_LIMIT:
        raise CheckpointError(f"{where} has {size} bytes; at most {JSON_LIMIT} were expected")
    try:
        # Looked at again by the kernel: between the check and this, the file may have become something else.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            return file.read(size).decode()
    except OSError as error:
        raise read_error(where, error) from None
    except (ValueError, MemoryError) as error:
        raise CheckpointError(f"{where} cannot be read: {shown(str(error) or 'too large')}") from None


def read_json(path: Path, declared: int | None = None) -> Any:
    """The content of a JSON file, read as `read_text` does."""
    text = read_text(path, declared)
    try:
        return json.loads(text)
    except RecursionError:
        raise CheckpointError(f"{path.parent.name}/{path.name} cannot be read: it is nested too deeply") from None
    except (ValueError, MemoryError) as error:
        why = shown(str(error) or "too large")
        raise CheckpointError(f"{path.parent.name}/{path.name} cannot be read: {why}") from None


def check_manifest(raw: dict[str, Any]) -> None:
    """Raises unless every field has the type and range that `Manifest` promises to those who use it."""
    for name, least in (("step", 0), ("epoch", 0), ("world_size", 1)):
        integer(raw[name], name, least)
    for name in ("strategy", "torch"):
        if not isinstance(raw[name], str) or not raw[name].isprintable():
            raise CheckpointError(f"{name} is {shown(raw[name])}; a word was expected")
    created = raw["created"]
    if type(created) not in (int, float) or not 0 <= created <= _LATEST:
        raise CheckpointError(f"created is {shown(created)}; a time was expected")
    for name, record in raw["files"].items():
        integer(record["bytes"], f"the size of {file_name(name)}")
        if not isinstance(record["xxh3"], str):
            raise CheckpointError(f"the checksum of {name} is {shown(record['xxh3'])}; a text was expected")
    for name, value in raw["metrics"].items():
        if not _is_number(value):
            raise CheckpointError(f"the metric {shown(name)} is {shown(value)}; a number was expected")


def _is_number(value: object) -> bool:
    if isinstance(value, str):  # how the manifest writes what JSON has no word for
        return value in ("nan", "inf", "-inf")
    if isinstance(value, int):
        return abs(value) <= _LARGEST
    return isinstance(value, float) and math.isfinite(value)
