"""A thin client of object stores: a few operations on keys under one address, each tried again until it is hopeless."""

from __future__ import annotations

import errno
import random
import re
import sys
import time
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from keepstep.errors import ConfigError, StorageError

FIRST_PATIENCE_S = 30.0
"""How long to go on trying where the store has never answered: its address is more likely wrong than it is down."""
PATIENCE_S = 300.0
"""How long to go on trying, from the first failure on, where it has answered before: a run is worth the wait."""
_LONGEST_PAUSE_S = 20.0
_WORTH_SAYING_S = 10.0
"""A shorter wait needs no words."""
_PART_BYTES = 16 << 20
_PACKAGES = {"s3": "keepstep[s3]", "s3a": "keepstep[s3]", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs"}
_OPTIONS: dict[str, dict[str, Any]] = {
    "s3": {
        # botocore's own retries draw from Python's generator, whose numbers are the training's: they are switched off.
        "config_kwargs": {"connect_timeout": 10, "read_timeout": 30, "retries": {"total_max_attempts": 1}},
        "max_concurrency": 8,
        "default_block_size": _PART_BYTES,
    }
}
_HOPELESS = (FileNotFoundError, PermissionError, ValueError, TypeError, AttributeError, ImportError)
_NO_BUCKET = re.compile(r"(bucket|container) does ?n[o']t exist|no.?such.?bucket", re.IGNORECASE)
_REFUSED = re.compile(
    r"access.?denied|invalid.?access.?key|signature.?does.?not.?match|(no|partial|locate) ?credentials|"
    r"credential ?retrieval|token.*expired",
    re.IGNORECASE,
)
_HOPELESS_NUMBERS = (errno.EINVAL, errno.ENOSPC, errno.EDQUOT, errno.EROFS)

T = TypeVar("T")


class MissingObject(StorageError):
    """There is no object of that name."""


class Remote:
    """Objects under one address. Every error is one line: what was tried, how often, and why it failed last."""

    def __init__(self, files: Any, root: str, url: str, part_options: dict[str, Any] | None = None) -> None:
        """`files`: a file system of fsspec; `root`: the address as it calls it."""
        self._files, self._root, self.url = files, root.rstrip("/"), url.rstrip("/")
        self._part_options = part_options or {}
        self._patience_s: float | None = None
        self._has_answered = False
        self._said = False
        # A generator of its own: Python's belongs to the training.
        self._random = random.Random()

    @classmethod
    def open(cls, url: str) -> Remote:
        protocol = url.partition("://")[0]
        files, root = _file_system(url, protocol)
        is_s3fs = type(files).__module__.startswith("s3fs")
        return cls(files, root, url, {"chunksize": _PART_BYTES} if is_s3fs else {})

    def put(self, local: Path, key: str) -> None:
        """Uploads a file; a large one in parts."""
        self._try("written", key, lambda: self._files.put_file(str(local), self._path(key), **self._part_options))

    def write(self, key: str, content: bytes) -> None:
        self._try("written", key, lambda: self._files.pipe_file(self._path(key), content))

    def get(self, key: str, local: Path) -> None:
        """Downloads an object; the file appears whole or not at all."""
        local.parent.mkdir(parents=True, exist_ok=True)
        temporary = local.with_name(f".{local.name}-{uuid.uuid4().hex[:8]}")

        def download() -> None:
            expected = self._files.info(self._path(key))["size"]
            self._files.get_file(self._path(key), str(temporary))
            if temporary.stat().st_size != expected:
                raise OSError(f"{temporary.stat().st_size} of {expected} bytes came")

        try:
            self._try("read", key, download)
            temporary.replace(local)
        finally:
            temporary.unlink(missing_ok=True)

    def read(self, key: str) -> bytes:
        content: bytes = self._try("read", key, lambda: self._files.cat_file(self._path(key)))
        return content

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """Key → size of every object under a prefix (a whole folder name, or nothing for all)."""
        path = self._path(prefix) if prefix else self._root
        find = partial(self._files.find, path, detail=True)
        found: dict[str, Any] = self._try("listed", prefix, lambda: _unless_missing(find, {}))
        # Some file systems put a slash before what they find, though not before what they were asked for.
        start = len(self._root.lstrip("/")) + 1
        return {name.lstrip("/")[start:]: int(entry["size"] or 0) for name, entry in found.items()}

    def folders(self) -> list[str]:
        """The names of the folders directly under this address."""
        look = partial(self._files.ls, self._root, detail=True)
        entries: list[dict[str, Any]] = self._try("listed", "", lambda: _unless_missing(look, []))
        return sorted(Path(entry["name"].rstrip("/")).name for entry in entries if entry["type"] == "directory")

    def delete(self, *keys: str) -> None:
        """Deletes objects; those that are gone already are no error."""
        # Many at once, where the file system can.
        calls = [keys] if self._files.async_impl and keys else [(key,) for key in keys]
        for some in calls:
            paths = [self._path(key) for key in some]
            delete = partial(self._files.rm, paths) if len(paths) > 1 else partial(self._files.rm_file, paths[0])
            self._try("deleted", some[0], partial(_unless_missing, delete, None))

    def exists(self, key: str) -> bool:
        try:
            self._try("looked at", key, lambda: self._files.info(self._path(key)))
        except MissingObject:
            return False
        return True

    def modified(self, key: str) -> float:
        """When an object was last written, by the store's clock."""
        moment: float = self._try("looked at", key, lambda: self._files.modified(self._path(key)).timestamp())
        return moment

    def hurried(self, patience_s: float) -> Remote:
        """The same objects, for something that is not worth a long wait."""
        hurried = Remote(self._files, self._root, self.url, self._part_options)
        hurried._patience_s, hurried._has_answered = patience_s, self._has_answered
        return hurried

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"

    def _try(self, done: str, key: str, call: Callable[[], T]) -> T:
        tries = 0
        failing_since: float | None = None
        while True:
            tries += 1
            try:
                result = call()
            except Exception as error:
                now = time.monotonic()
                # From the first failure on: how long a large file takes is no reason to give it up.
                failing_since = failing_since if failing_since is not None else now
                patience = self._patience_s or (PATIENCE_S if self._has_answered else FIRST_PATIENCE_S)
                if _is_hopeless(error) or now - failing_since >= patience:
                    raise self._error(done, key, tries, now - failing_since, error) from error
                self._say_once(error, patience)
                pause = min(0.25 * 2**tries, _LONGEST_PAUSE_S) * self._random.uniform(0.5, 1.0)
                time.sleep(min(pause, failing_since + patience - now))
            else:
                self._has_answered = True
                return result

    def _say_once(self, error: Exception, patience_s: float) -> None:
        """Half a minute of silence is taken for a hang; later troubles pass, and are told if they do not."""
        if self._has_answered or self._said or patience_s < _WORTH_SAYING_S:
            return
        self._said = True
        seen = f"{self.url} does not answer ({_in_one_line(error)})"
        print(f"keepstep: {seen}; trying for {patience_s:.0f} s", file=sys.stderr, flush=True)

    def _error(self, done: str, key: str, tries: int, seconds: float, error: Exception) -> StorageError:
        often = f", tried {tries} times in {seconds:.0f} s" if tries > 1 else ""
        cause = _in_one_line(error)
        kind, advice = StorageError, ""
        if isinstance(error, FileNotFoundError):
            if done != "written" and not _lacks_bucket(error):
                kind = MissingObject
            advice = "; is there such a bucket?"
        elif isinstance(error, PermissionError) or _REFUSED.search(f"{type(error).__name__}: {error}"):
            advice = (
                "; who you are, and where the store is, comes from the environment (AWS_ACCESS_KEY_ID, ~/.aws, ...)"
            )
        where = f"{self.url}/{key}" if key else self.url
        return kind(f"{where} could not be {done}{often} ({cause}){advice}")


def _in_one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _is_hopeless(error: Exception) -> bool:
    """Whether trying again cannot help."""
    if isinstance(error, _HOPELESS) or getattr(error, "errno", None) in _HOPELESS_NUMBERS:
        return True
    text = f"{type(error).__name__}: {error}"
    return bool(_NO_BUCKET.search(text) or _REFUSED.search(text))


def _unless_missing(call: Callable[[], T], otherwise: T) -> T:
    try:
        return call()
    except FileNotFoundError as error:
        if _lacks_bucket(error):
            raise
        return otherwise


def _lacks_bucket(error: Exception) -> bool:
    return bool(_NO_BUCKET.search(str(error)))


def _file_system(url: str, protocol: str) -> tuple[Any, str]:
    """fsspec's file system for an address, or pyarrow's where fsspec has none here; and the address as it calls it."""
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise ConfigError(_to_install(url, protocol)) from None
    options = {"use_listings_cache": False, "skip_instance_cache": True, **_OPTIONS.get(protocol, {})}
    try:
        files, root = url_to_fs(url, **options)
    except (ImportError, ValueError) as error:
        wrapped = _arrow_file_system(url)
        if wrapped is None:
            known = isinstance(error, ImportError) or protocol in _PACKAGES
            reason = _to_install(url, protocol) if known else f"--storage {url}: {error}"
            raise ConfigError(reason) from None
        return wrapped
    if hasattr(files, "retries"):
        files.retries = 2  # within one try of ours, for one part of a large file
    return files, root


def _arrow_file_system(url: str) -> tuple[Any, str] | None:
    try:
        from fsspec.implementations.arrow import ArrowFSWrapper
        from pyarrow.fs import FileSystem

        files, root = FileSystem.from_uri(url)
    except (ImportError, ValueError, OSError):  # pyarrow has none either
        return None
    return ArrowFSWrapper(files), root


def _to_install(url: str, protocol: str) -> str:
    package = _PACKAGES.get(protocol, "fsspec and the package that it names for this protocol")
    return f"--storage {url} needs a package that is not installed: pip install '{package}'"
