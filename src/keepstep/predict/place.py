"""Where Parquet files lie: a file, a folder, or any address that fsspec or pyarrow reads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq

from keepstep.errors import ConfigError, DataError
from keepstep.storage import Storage

READ_ERRORS = (OSError, pa.ArrowException)
"""What pyarrow raises for a file that is not there, not readable, or not Parquet."""


def in_words(error: BaseException) -> str:
    """An error of pyarrow or of the system, for one line."""
    if isinstance(error, PermissionError):
        return "permission denied"
    if isinstance(error, FileNotFoundError):
        return "no such file"
    return " ".join(str(error).split())[:200] or type(error).__name__


def absolute(address: str) -> str:
    """The address in words that mean the same in any folder: of an object store, or a path."""
    storage = Storage.parse(address)
    return storage.url or str(storage.folder.absolute())


@dataclass(frozen=True)
class Place:
    """A file or a folder, on a disk or in an object store."""

    address: str
    files: Any
    """pyarrow's file system."""
    root: str
    """The address as the file system calls it."""

    @classmethod
    def open(cls, address: str) -> Place:
        path = absolute(address)
        if "://" not in path:
            return cls(address, pa.fs.LocalFileSystem(), path)
        files, root = _file_system(address)
        return cls(address, files, root.rstrip("/"))

    @property
    def is_local(self) -> bool:
        return isinstance(self.files, pa.fs.LocalFileSystem)

    def parquet_files(self) -> dict[str, str]:
        """Name in this place → path, of all Parquet files, in the order of their names."""
        try:
            found = self.files.get_file_info(self.root)
            if found.type == pa.fs.FileType.File:
                return {Path(self.root).name: self.root}
            if found.type == pa.fs.FileType.NotFound:
                raise DataError(f"there is no {self.address}; --data names a Parquet file, or a folder of them")
            entries = self.files.get_file_info(pa.fs.FileSelector(self.root, recursive=True))
        except READ_ERRORS as error:
            raise DataError(f"{self.address} cannot be read ({in_words(error)})") from None
        start = len(self.root) + 1
        paths = {entry.path[start:]: entry.path for entry in entries if entry.type == pa.fs.FileType.File}
        chosen = {name: path for name, path in sorted(paths.items()) if _is_data(name)}
        if not chosen:
            raise DataError(f"{self.address} has no .parquet file in it ({len(paths)} other files)")
        return chosen

    def open_parquet(self, path: str) -> Any:
        # Over a network, many small reads would be many round trips.
        return pq.ParquetFile(path, filesystem=self.files, pre_buffer=not self.is_local)


def _is_data(name: str) -> bool:
    """As Spark, pyarrow and Ray have it: what begins with a dot or an underscore is somebody's note."""
    return name.endswith((".parquet", ".parq", ".pq")) and not any(part[0] in "._" for part in name.split("/"))


def _file_system(address: str) -> tuple[Any, str]:
    """fsspec's where it has one, as `--storage` does, else pyarrow's own."""
    try:
        from fsspec.core import url_to_fs

        files, root = url_to_fs(address, use_listings_cache=False, skip_instance_cache=True)
        return pa.fs.PyFileSystem(pa.fs.FSSpecHandler(files)), str(root)
    except (ImportError, ValueError):
        pass
    try:
        files, root = pa.fs.FileSystem.from_uri(address)
        return files, str(root)
    except (ValueError, *READ_ERRORS) as error:
        raise ConfigError(
            f"{address} cannot be opened ({in_words(error)}); install the fsspec package of its protocol, as "
            "pip install 'keepstep[s3]', or give a folder"
        ) from None
