"""`keepstep checkpoints` lists what there is, marks the newest and the best, and finds what is bad."""

from __future__ import annotations

import io
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from keepstep import checkpoints
from keepstep.checkpoint.dcp import INDEX
from keepstep.checkpoint.saver import STATE, Saver
from keepstep.checkpoint.store import Manifest, Store
from keepstep.checkpoints import print_checkpoints, size_text
from keepstep.errors import RunFolderError
from keepstep.folder import RunFolder
from unit.checkpoint.forgery import forge


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path, "vit")
    folder.create()
    return folder


def save(run: RunFolder, step: int, **metrics: float) -> Path:
    store = Store(run.checkpoints, keep=99)
    saver = Saver(store, 0, None, "nonce", False, lambda manifest, seconds: None)
    manifest = Manifest(step, step // 10, 1, "single", metrics=metrics)
    saver.save(manifest, {"model": {"w": torch.ones(1000)}}, {"rng": None}, wait=True)
    return store.path(step)


def lines_of(run: RunFolder, capsys: pytest.CaptureFixture[str], verify: bool = False, code: int = 0) -> list[str]:
    assert print_checkpoints(run.path.parent, run.name, verify) == code
    return capsys.readouterr().out.splitlines()


def test_checkpoints_are_listed_with_what_their_manifests_say(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    save(run, 10, loss=0.5, accuracy=0.75)
    save(run, 20, loss=float("nan"))
    Store(run.checkpoints, keep=9).remember_best(10, "accuracy", 0.75)
    first, second = lines_of(run, capsys)
    when = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
    start, end = rf"step 10  epoch 1  {when}  \d\.\d KB  single, 1 worker", "best accuracy 0.75"
    assert re.fullmatch(rf"{start}  loss 0.5  accuracy 0.75  {end}", first)
    assert second.startswith("step 20  epoch 2") and second.endswith("loss nan  newest")


def test_a_run_without_checkpoints_says_so(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert lines_of(run, capsys) == ["run 'vit' has no checkpoint yet"]
    with pytest.raises(RunFolderError, match="there is no run 'vti'"):
        print_checkpoints(run.path.parent, "vti")


def test_what_lies_beside_them_is_named(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    save(run, 10)
    for name in ("damaged-step_00000030-ab", ".writing-step_00000020-cd"):
        (run.checkpoints / name).mkdir()
        (run.checkpoints / name / "file").write_bytes(bytes(1500))
    (run.checkpoints / "notes\x1b[2J.txt").write_text("mine")
    _, *others = lines_of(run, capsys)
    assert others == [
        ".writing-step_00000020-cd  1.5 KB  left by an interrupted save; the next start deletes it",
        "damaged-step_00000030-ab  1.5 KB  set aside, for it could not be read; delete it when you know why",
        "notes?[2J.txt  4 B  not keepstep's",
    ]
    run.hold()
    assert any(line.endswith("being written") for line in lines_of(run, capsys))
    run.release()


def test_verify_finds_what_is_bad(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    folders = {step: save(run, step) for step in (10, 20, 30, 40)}
    assert [line.rpartition("  ")[2] for line in lines_of(run, capsys, verify=True)] == ["good"] * 3 + ["newest, good"]
    (folders[10] / STATE).unlink()
    forge(folders[20], INDEX, lambda index: index["model/w"].update(shape=[999]))
    (folders[30] / "manifest.json").write_text("{")
    first, second, third, fourth = lines_of(run, capsys, verify=True, code=1)
    assert first.startswith("step 10  ") and first.endswith("BAD: step_00000010/state.json is missing")
    assert "BAD: step_00000020/tensors.json cannot be read: tensor 'model/w'" in second
    assert "BAD: step_00000030/manifest.json cannot be read" in third
    assert fourth.endswith("newest, good")


def test_without_verify_only_the_manifest_is_read(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save(run, 10)
    (folder / STATE).unlink()
    (line,) = lines_of(run, capsys)
    assert line.endswith("newest")
    (folder / "manifest.json").unlink()
    (line,) = lines_of(run, capsys, code=1)
    assert line.endswith("newest, BAD: step_00000010 has no manifest.json")


def test_one_that_a_run_deletes_meanwhile_is_not_bad(
    run: RunFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save(run, 10)
    real = Store.read_manifest

    def gone(self: Store, step: int) -> Any:
        if step == 5:
            (self.path(5)).rmdir()
        return real(self, step)

    (run.checkpoints / "step_00000005").mkdir()
    monkeypatch.setattr(Store, "read_manifest", gone)
    assert [line.partition("  ")[0] for line in lines_of(run, capsys, verify=True)] == ["step 10"]


URL = "memory://bucket/runs"
STORED = f"{URL}/vit"


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunFolder]:
    """A run in an object store, with checkpoints of steps 10 and 20 there, and a cache on this machine."""
    memory = pytest.importorskip("fsspec.implementations.memory")
    monkeypatch.setenv("KEEPSTEP_CACHE", str(tmp_path))
    folder = RunFolder(URL, "vit")
    folder.create()
    assert folder.mirror is not None
    for step in (10, 20):
        folder.mirror.publish(save(folder, step), 9, None)
    yield folder
    memory.MemoryFileSystem.store.clear()
    memory.MemoryFileSystem.pseudo_dirs[:] = [""]


def lines_of_stored(capsys: pytest.CaptureFixture[str], verify: bool = True, code: int = 0) -> list[str]:
    assert print_checkpoints(URL, "vit", verify) == code
    return capsys.readouterr().out.splitlines()


def flip_a_bit(run: RunFolder, key: str) -> None:
    assert run.mirror is not None
    content = bytearray(run.mirror.remote.read(key))
    content[-1] ^= 1
    run.mirror.remote.write(key, bytes(content))


def test_verify_reads_the_stores_own_objects_and_leaves_nothing(
    stored: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(stored.checkpoints / "step_00000010")
    first, second = lines_of_stored(capsys, verify=False)
    assert re.fullmatch(r"step 10  \d\.\d KB  in the object store only; --verify reads it", first)
    assert second.endswith("newest")
    before = sorted(stored.path.rglob("*"))
    assert [line.rpartition("  ")[2] for line in lines_of_stored(capsys)] == ["good", "newest, good"]
    assert sorted(stored.path.rglob("*")) == before


@pytest.mark.parametrize("name", ["rank_00000.safetensors", STATE, INDEX])
def test_a_bit_that_flipped_in_the_store_is_found_though_the_cache_is_good(
    stored: RunFolder, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    flip_a_bit(stored, f"checkpoints/step_00000020/{name}")
    good, bad = lines_of_stored(capsys, code=1)
    assert good.endswith("  good")
    damage = f"BAD in {STORED}: step_00000020/{name} is damaged: its checksum differs"
    assert bad.endswith(f"  newest, {damage}; this machine's copy is good")
    shutil.rmtree(stored.checkpoints)
    _, bad = lines_of_stored(capsys, code=1)
    assert bad.endswith(f"  newest, {damage}")
    assert re.match(r"step 20  \d\.\d KB  ", bad), "its size is that of the objects"


def test_damage_on_this_machine_is_told_from_damage_in_the_store(
    stored: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    (stored.checkpoints / "step_00000020" / STATE).unlink()
    bad = lines_of_stored(capsys, code=1)[1]
    found = "BAD on this machine: step_00000020/state.json is missing"
    assert bad.endswith(f"{found}; the copy in {STORED} is good")
    assert stored.mirror is not None
    stored.mirror.remote.write("checkpoints/step_00000020/manifest.json", b"[]")
    bad = lines_of_stored(capsys, code=1)[1]
    assert f"BAD in {STORED}: step_00000020/manifest.json cannot be used: it is []; an object was expected" in bad
    assert bad.endswith(found)


def test_a_checkpoint_in_the_store_must_fit_together_too(stored: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    """Its checksums are right: anybody can make those."""
    assert stored.mirror is not None
    folder = stored.checkpoints / "step_00000020"
    forge(folder, INDEX, lambda index: index["model/w"].update(shape=[999]))
    stored.mirror.publish(folder, 9, None)
    shutil.rmtree(folder)
    assert f"BAD in {STORED}: step_00000020/tensors.json cannot be read" in lines_of_stored(capsys, code=1)[1]


def test_on_a_terminal_it_is_a_table(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    save(run, 10, loss=0.5)
    save(run, 20)
    screen = io.StringIO()
    terminal = Console(file=screen, force_terminal=True, width=160, color_system=None)
    monkeypatch.setattr(checkpoints, "Console", lambda **_: terminal)
    print_checkpoints(run.path.parent, run.name)
    header, first, second = (" ".join(line.split()) for line in screen.getvalue().splitlines())
    assert header == "checkpoint epoch saved size by metrics"
    assert first.startswith("step 10 1 20") and first.endswith("single, 1 worker loss 0.5")
    assert second.endswith("newest")


def test_listing_changes_nothing(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save(run, 10)
    before = {path.name: path.stat().st_mtime_ns for path in [*folder.iterdir(), *run.checkpoints.iterdir()]}
    lines_of(run, capsys, verify=True)
    assert {path.name: path.stat().st_mtime_ns for path in [*folder.iterdir(), *run.checkpoints.iterdir()]} == before


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 KB"), (2_340_000, "2.3 MB"), (5 * 10**15, "5000.0 TB")],
)
def test_sizes(num_bytes: int, text: str) -> None:
    assert size_text(num_bytes) == text
