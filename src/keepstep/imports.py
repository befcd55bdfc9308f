"""What a script imports from installed packages: noted by a worker, so that a standby can import it ahead.

Only where that cannot be told from importing it later: the user's own files are never run ahead, nor are packages
whose import depends on what the script has done before it.
"""

from __future__ import annotations

import importlib
import json
import os
import site
import sys
import sysconfig
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType


def _folders(*paths: str) -> tuple[str, ...]:
    """As they are written, and as they are without links: modules may have been found either way."""
    return tuple({f"{folder}{os.sep}" for path in paths for folder in (path, os.path.realpath(path))})


_INSTALLED = _folders(
    *site.getsitepackages(), site.getusersitepackages(), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")
)
_STANDARD = _folders(sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))


class _Witness(MetaPathFinder):
    """Finds nothing, but sees the imports begin; sys.modules has them in the order in which they ended."""

    def __init__(self) -> None:
        self.environment, self.names = dict(os.environ), list[str]()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        self.names.append(fullname)
        return None


_witness: _Witness | None = None
"""Of the script that this process runs."""


def script_begins() -> None:
    """Called before a worker runs its script."""
    global _witness
    _witness = _Witness()
    sys.meta_path.insert(0, _witness)


def note_imports(file: Path) -> None:
    """Writes the names of the installed modules that were imported since the script began, in their order.

    None, if the script, or a package, has set environment variables: they may be what later imports go by.
    """
    global _witness
    witness, _witness = _witness, None
    names = []
    if witness is not None:
        sys.meta_path.remove(witness)
        if _settings(os.environ) == _settings(witness.environment):
            names = [name for name in dict.fromkeys(witness.names) if _is_installed(name)]
    half = file.with_name(f".{file.name}")
    half.write_text(json.dumps(names))
    half.replace(file)


def import_ahead(names: list[str], script_folder: str | None, enough: Callable[[], bool]) -> None:
    """Imports what was noted, until it is `enough`. Raises `Unfit` where that would do more than import."""
    guard, before = _OnlyInstalled(), _effects()
    sys.meta_path.insert(0, guard)
    if script_folder is not None:
        sys.path.insert(0, script_folder)  # where the script would look first: the guard must see what it would find
    try:
        for name in names:
            if enough():
                break
            with suppress(Exception):  # the script will say what is wrong with it
                importlib.import_module(name)
    finally:
        if script_folder is not None:
            sys.path.remove(script_folder)
        sys.meta_path.remove(guard)
    if _effects() != before:
        raise Unfit


class Unfit(BaseException):
    """These imports cannot be done ahead. No `Exception`: packages forgive themselves failed imports."""


class _OnlyInstalled(MetaPathFinder):
    """Raises before a file of the user's own is run: it would run once more, and know nothing of the script."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if path is not None:  # of a package that has passed
            return None
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(fullname, None, target)) is not None:
                places = [spec.origin] if spec.has_location else list(spec.submodule_search_locations or [])
                if not all(place and _is_in(place, _INSTALLED + _STANDARD) for place in places):
                    raise Unfit
                return spec
        return None


def _settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Less what torch sets when it makes its first step, and keepstep when workers meet."""
    ours = ("TORCHINDUCTOR_CACHE_DIR", "TORCH_FR_BUFFER_SIZE")
    return {name: value for name, value in environment.items() if name not in ours}


def _is_installed(name: str) -> bool:
    spec = getattr(sys.modules.get(name), "__spec__", None)
    if spec is None or spec.name != name or not spec.has_location or spec.origin is None:
        return False
    return _is_in(spec.origin, _INSTALLED)


def _is_in(place: str, folders: tuple[str, ...]) -> bool:
    return place.startswith(folders) or os.path.realpath(place).startswith(folders)


def _effects() -> tuple[object, ...]:
    """What imports may change beyond the modules: threads, processes, and whether a GPU is taken."""
    import psutil
    import torch

    taken = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return set(threading.enumerate()), {child.pid for child in psutil.Process().children()}, taken
