"""What is imported ahead: installed packages only, and only where nobody can tell."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepstep import imports
from keepstep.imports import Unfit, import_ahead, note_imports, script_begins


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of installed packages."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    monkeypatch.setattr(imports, "_INSTALLED", (f"{folder}/",))
    monkeypatch.setattr(sys, "path", [*sys.path, str(folder)])
    before = set(sys.modules)
    yield folder
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, imports._Witness)]
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


def ahead(*names: str, script_folder: Path | None = None) -> list[str]:
    import_ahead(list(names), str(script_folder) if script_folder else None, lambda: False)
    return [name for name in names if name in sys.modules]


def test_installed_modules_are_noted_in_the_order_of_their_import(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (installed / "ks_zebra.py").write_text("import ks_ant")
    (installed / "ks_ant.py").write_text("")
    (tmp_path / "ks_mine.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    script_begins()
    import ks_mine  # noqa: F401  # type: ignore[import-not-found]
    import ks_zebra  # noqa: F401  # type: ignore[import-not-found]

    note_imports(tmp_path / "noted")
    assert json.loads((tmp_path / "noted").read_text()) == ["ks_zebra", "ks_ant"]


def test_a_script_that_sets_variables_is_left_alone(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (installed / "ks_reads.py").write_text("")
    script_begins()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "torch does that")
    import ks_reads  # noqa: F401  # type: ignore[import-not-found]

    note_imports(tmp_path / "noted")
    assert json.loads((tmp_path / "noted").read_text()) == ["ks_reads"]
    sys.modules.pop("ks_reads")
    script_begins()
    monkeypatch.setenv("HF_HOME", "elsewhere")

    note_imports(tmp_path / "noted")
    assert json.loads((tmp_path / "noted").read_text()) == []


def test_what_fails_is_skipped(installed: Path) -> None:
    (installed / "ks_fails.py").write_text("1 / 0")
    (installed / "ks_works.py").write_text("")
    path, finders = list(sys.path), list(sys.meta_path)
    assert ahead("ks_fails", "ks_absent", "ks_works", script_folder=installed.parent) == ["ks_works"]
    assert sys.path == path and sys.meta_path == finders


def test_the_users_own_files_are_never_run(installed: Path, tmp_path: Path) -> None:
    """Nor are they by a package that looks whether there is such a module."""
    (installed / "ks_looks.py").write_text("try:\n    import ks_config\nexcept ImportError:\n    pass\n")
    (tmp_path / "ks_config.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(Unfit):
        ahead("ks_looks", script_folder=tmp_path)
    assert not (tmp_path / "ran").exists()
    assert str(tmp_path) not in sys.path
    sys.modules.pop("ks_looks", None)
    assert ahead("ks_looks") == ["ks_looks"]


def test_what_starts_threads_is_unfit(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave = threading.Event()
    monkeypatch.setattr(os, "ks_leave", leave, raising=False)
    (installed / "ks_quiet.py").write_text("")
    assert ahead("ks_quiet") == ["ks_quiet"]
    text = "import os, threading\nthreading.Thread(target=os.ks_leave.wait, daemon=True).start()\n"
    (installed / "ks_threads.py").write_text(text)
    try:
        with pytest.raises(Unfit):
            ahead("ks_threads")
    finally:
        leave.set()
