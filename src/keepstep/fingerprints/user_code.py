"""Which files are the user's own, and what to call them where nobody's machine should show."""

from __future__ import annotations

import os
import site
import sys
import sysconfig
from functools import lru_cache
from pathlib import Path
from typing import Any

_INSTALLED = ("site-packages", "dist-packages")


@lru_cache(maxsize=4096)
def is_user_file(filename: str) -> bool:
    """Whether code is the user's: not Python's own, not installed, not keepstep's."""
    if filename.startswith("<") or any(part in _INSTALLED for part in Path(filename).parts):
        return False
    path = str(Path(filename).resolve())
    return not path.startswith(_not_the_users())


@lru_cache(maxsize=1)
def _not_the_users() -> tuple[str, ...]:
    standard = (sysconfig.get_path(name) for name in ("stdlib", "platstdlib"))
    folders = [*filter(None, standard), *site.getsitepackages(), str(Path(__file__).parents[1])]
    return tuple(str(Path(folder).resolve()) + os.sep for folder in folders)


@lru_cache(maxsize=4096)
def short_name(filename: str) -> str:
    """A file's name from the current folder or from the script's; the bare name for one that is in neither."""
    path = Path(filename).resolve()
    for folder in (Path.cwd(), Path(sys.argv[0] or ".").resolve().parent):
        if path.is_relative_to(folder):
            return path.relative_to(folder).as_posix()
    return path.name


def user_files() -> list[str]:
    """The user's files that this process has imported, the script first."""
    files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    own = [file for file in (sys.argv[0], *files) if file and file.endswith(".py") and is_user_file(file)]
    return list(dict.fromkeys(map(short_name, own)))


def file_of_class(kind: type[Any]) -> str | None:
    """The file that a user's class stands in; None for everybody else's classes."""
    module = sys.modules.get(kind.__module__)
    filename = getattr(module, "__file__", None)
    return filename if filename and is_user_file(filename) else None
