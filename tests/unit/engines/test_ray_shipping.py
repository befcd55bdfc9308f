"""What other machines get of the script's folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepstep.engines.ray_relay import Follower, write_pieces
from keepstep.engines.ray_shipping import as_shipped, runtime_environment
from keepstep.errors import ConfigError
from keepstep.job import Target


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text("")
    monkeypatch.chdir(folder)
    return folder


def test_the_current_folder_goes_without_its_runs(project: Path) -> None:
    with runtime_environment(None, project / "outputs") as environment:
        assert environment["working_dir"] == str(project)
        assert "/outputs/" in environment["excludes"] and ".git/" in environment["excludes"]


def test_what_else_is_named_goes_with_it(project: Path, tmp_path: Path) -> None:
    (tmp_path / "vocabulary.txt").write_text("a b")
    with runtime_environment("../vocabulary.txt", None) as environment:
        staged = Path(environment["working_dir"])
        assert (staged / "vocabulary.txt").read_text() == "a b"
        assert (staged / "train.py").exists()
    assert not staged.exists()
    with (
        pytest.raises(ConfigError, match=r"--ship names no\.txt, which is not there"),
        runtime_environment("no.txt", None),
    ):
        pass


def test_a_folder_that_is_too_large_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match="too large to be sent to the other nodes"), runtime_environment(None, None):
        raise RuntimeError("Package size (900 MiB) exceeds the maximum size of 500 MiB")


def test_a_script_is_called_by_its_place_in_the_folder(project: Path, tmp_path: Path) -> None:
    assert as_shipped(Target(str(project / "train.py"), ("--lr", "1"))) == Target("train.py", ("--lr", "1"))
    assert as_shipped(Target("package.module:function")) == Target("package.module:function")
    with pytest.raises(ConfigError, match="the folder that other nodes get"):
        as_shipped(Target(str(tmp_path / "elsewhere.py")))


def test_what_grew_there_grows_here_and_what_was_cut_is_cut(tmp_path: Path) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    there.mkdir()
    here.mkdir()
    (there / "metrics.jsonl").write_text("old\n")
    (here / "metrics.jsonl").write_text("old\n")
    follower = Follower(there)
    assert follower.pieces() == []
    for content in ("old\n1\n", "old\n1\n2\n3\n", "old\n1\n", "old\n1\nother\n"):
        (there / "metrics.jsonl").write_text(content)
        (there / "events.jsonl").write_text(f"event {content}")
        (there / "config.json").write_text(f"{len(content):05d}")
        write_pieces(here, follower.pieces())
        assert (here / "metrics.jsonl").read_text() == content
        assert (here / "config.json").read_text() == f"{len(content):05d}"
    assert (here / "events.jsonl").read_text() == "event old\n1\nother\n"
