"""What `--storage` names: a folder, or the address of an object store, which has a cache folder on this machine."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from keepstep.errors import ConfigError


@dataclass(frozen=True)
class Storage:
    """A place of runs."""

    folder: Path
    """Of the run folders, on this machine."""
    url: str | None = None
    """Of the object store, where it is one."""

    @classmethod
    def parse(cls, storage: str | Path) -> Storage:
        text = str(storage)
        if isinstance(storage, Path) and re.match(r"[a-z][a-z0-9]+:/", text):  # pathlib has eaten a slash
            raise ConfigError(f"{text} is the address of an object store; here a folder is needed")
        if isinstance(storage, Path) or "://" not in text:
            return cls(Path(storage).expanduser())
        if text.startswith("file://"):
            return cls(Path(unquote(urlsplit(text).path)))
        url = text.rstrip("/")
        if not url.partition("://")[2]:
            raise ConfigError(f"--storage is {text!r}; name a bucket, as s3://bucket/runs")
        return cls(_cache() / _cache_name(url), url)

    def names(self) -> list[str]:
        """The runs in the object store, if it is one."""
        if self.url is None:
            return []
        from keepstep.checkpoint.remote import Remote

        return Remote.open(self.url).folders()


def _cache() -> Path:
    given = os.environ.get("KEEPSTEP_CACHE")
    if given:
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "keepstep"


def _cache_name(url: str) -> str:
    """Readable, and never the same for two stores: one bucket's name may exist at several endpoints."""
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", url)[:80]
    return f"{readable}-{hashlib.sha256(f'{url} {endpoint}'.encode()).hexdigest()[:8]}"
