"""What --storage names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from keepstep.errors import ConfigError
from keepstep.folder import RunFolder
from keepstep.storage import Storage


def test_folders_are_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Storage.parse("runs") == Storage(Path("runs"))
    assert Storage.parse(tmp_path) == Storage(tmp_path)
    assert Storage.parse("~/runs") == Storage(tmp_path / "runs")
    assert Storage.parse("file:///data/my%20runs") == Storage(Path("/data/my runs"))


def test_an_address_has_a_folder_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEEPSTEP_CACHE", str(tmp_path))
    place = Storage.parse("s3://bucket/team/runs/")
    assert place.url == "s3://bucket/team/runs"
    assert place.folder.parent == tmp_path and place.folder.name.startswith("s3-bucket-team-runs-")
    assert Storage.parse("s3://bucket/team-runs").folder != place.folder
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://elsewhere")
    assert Storage.parse("s3://bucket/team/runs").folder != place.folder, "another store"
    folder = RunFolder("s3://bucket/team/runs", "vit")
    assert folder.where == "s3://bucket/team/runs/vit" and folder.path.name == "vit"


def test_the_cache_is_where_caches_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KEEPSTEP_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Storage.parse("s3://b").folder.parent == tmp_path / ".cache" / "keepstep"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert Storage.parse("s3://b").folder.parent == tmp_path / "x" / "keepstep"


def test_an_address_where_a_folder_is_needed_is_refused() -> None:
    with pytest.raises(ConfigError, match="here a folder is needed"):
        RunFolder(Path("s3://bucket/runs"), "demo-calm")


def test_an_address_without_a_bucket_is_refused() -> None:
    with pytest.raises(ConfigError, match="name a bucket"):
        Storage.parse("s3://")


def test_a_folder_needs_none_of_the_packages_for_object_stores() -> None:
    code = "import sys; sys.modules.update(fsspec=None, s3fs=None); from keepstep.folder import RunFolder; "
    code += "assert RunFolder('runs', 'a').mirror is None; import keepstep.supervisor, keepstep.checkpoint.saver"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
