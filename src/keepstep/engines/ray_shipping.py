"""What a script needs on machines that do not share its folder: that folder, and what else was named."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from keepstep.errors import ConfigError
from keepstep.job import Target

_LEFT_OUT = [".git/", ".venv/", "venv/", "__pycache__/", "node_modules/", "runs/"]
"""Beside what .gitignore names, which Ray leaves out by itself."""
_IN_A_RAY_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
_TOO_LARGE = "exceeds the maximum size"


def is_shipped_already() -> bool:
    """Whether this process runs in a job that was submitted to Ray, which has the folder on all nodes."""
    return _IN_A_RAY_JOB in os.environ


@contextmanager
def runtime_environment(extra: str | None, storage: Path | None) -> Iterator[dict[str, Any]]:
    """Ray's description of it. `extra`: paths, with commas between; `storage`: where runs are kept, on a disk."""
    here = Path.cwd()
    left_out = [*_LEFT_OUT, *([f"/{storage.relative_to(here)}/"] if storage and storage.is_relative_to(here) else [])]
    named = [Path(path.strip()) for path in extra.split(",")] if extra else []
    for path in named:
        if not path.exists():
            raise ConfigError(f"--ship names {path}, which is not there; give files and folders, with commas between")
    with TemporaryDirectory(prefix="keepstep-ship-") as staged:
        if named:  # Ray ships one folder: all are put into one
            for path in [*here.iterdir(), *(path.resolve() for path in named)]:
                link = Path(staged) / path.name
                if not link.is_symlink():
                    link.symlink_to(path)
        folder = staged if named else str(here)
        try:
            yield {"working_dir": folder, "excludes": left_out}
        except (RuntimeError, ValueError) as error:
            if _TOO_LARGE not in str(error):
                raise
            raise ConfigError(
                f"the current folder, {here}, is too large to be sent to the other nodes: {str(error).splitlines()[0]} "
                "Start in the script's own folder, name what is not needed in .gitignore, and keep data on shared disks"
            ) from None


def as_shipped(target: Target) -> Target:
    """The target as the other machines have it: its script by the path in the folder that was shipped."""
    if not target.is_script:
        return target
    script, here = Path(target.what).resolve(), Path.cwd()
    if not script.is_relative_to(here):
        raise ConfigError(
            f"{target.what} is not in {here}, the folder that other nodes get; start in the script's own folder"
        )
    return replace(target, what=str(script.relative_to(here)))
