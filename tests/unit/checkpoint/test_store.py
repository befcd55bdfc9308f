"""A checkpoint is there whole or not at all; damage is named; the newest and the best are kept."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.checkpoint import store as store_module
from keepstep.checkpoint.store import (
    MANIFEST,
    FileRecord,
    Manifest,
    Store,
    digest,
    newest_first,
    record,
    write_durably,
)
from keepstep.errors import CheckpointError

CONTENT = {"state.json": b'{"a": 1}', "rank_00000.safetensors": bytes(range(256)) * 4}


def commit(store: Store, step: int, content: dict[str, bytes] = CONTENT, **fields: Any) -> Path:
    folder = store.begin(step, "nonce")
    for name, data in content.items():
        (folder / name).write_bytes(data)
    files = {name: record(folder / name) for name in content}
    return store.commit(folder, Manifest(step, 0, 1, "single", files=files, **fields))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "checkpoints", keep=2)


def test_a_committed_checkpoint_is_whole(store: Store) -> None:
    folder = commit(store, 7, metrics={"loss": 0.5})
    assert folder == store.path(7) and folder.name == "step_00000007"
    assert store.steps() == [7]
    store.check(7)
    assert store.read_manifest(7).metrics == {"loss": 0.5}
    assert [path.name for path in store.root.iterdir()] == ["step_00000007"]


def test_what_is_being_written_is_not_there_yet(store: Store) -> None:
    folder = store.begin(7, "nonce")
    (folder / MANIFEST).write_text("{}")
    assert store.steps() == []


def test_workers_of_one_attempt_share_a_folder_and_other_attempts_have_their_own(store: Store) -> None:
    assert store.begin(7, "a") == store.begin(7, "a")
    assert store.begin(7, "a") != store.begin(7, "b")


def test_a_store_without_a_folder_has_no_checkpoints(store: Store) -> None:
    assert store.steps() == [] and store.best() is None and store.prune() == []
    store.sweep()


def test_steps_are_in_order_of_number_and_other_names_are_passed_over(store: Store) -> None:
    for step in (30, 4, 200, 123_456_789):
        commit(store, step)
    for name in ("step_12", "step_00000001x", "notes", ".writing-step_00000005-n", "step_-0000001"):
        (store.root / name).mkdir()
    assert store.steps() == [4, 30, 200, 123_456_789]
    assert list(newest_first(store)) == [123_456_789, 200, 30, 4]


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


def _to_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("name", CONTENT)
@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (Path.unlink, "is missing"),
        (_truncate, "were written"),
        (_lengthen, "were written"),
        (lambda path: path.write_bytes(b""), "has 0 bytes"),
        (_flip, "is damaged: its checksum differs"),
        (_to_folder, "is not a regular file"),
    ],
    ids=["deleted", "truncated", "lengthened", "emptied", "flipped bit", "a folder"],
)
def test_damage_is_found_and_named(store: Store, name: str, damage: Callable[[Path], Any], complaint: str) -> None:
    damage(commit(store, 7) / name)
    with pytest.raises(CheckpointError) as error:
        store.check(7)
    assert f"step_00000007/{name}" in str(error.value)
    assert complaint in str(error.value)


@settings(max_examples=40)
@given(data=st.data())
def test_any_flipped_bit_of_any_file_is_found(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    store = Store(tmp_path_factory.mktemp("store"), keep=1)
    folder = commit(store, 1)
    path = folder / data.draw(st.sampled_from(sorted(CONTENT)))
    content = bytearray(path.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="damaged"):
        store.check(1)


@settings(max_examples=100)
@given(data=st.data())
def test_any_flipped_bit_of_the_manifest_is_found(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """It says how many workers saved, which decides whether random numbers go on: it must be believed or not, too."""
    store = Store(tmp_path_factory.mktemp("store"), keep=1)
    path = commit(store, 1, metrics={"loss": 0.25}, created=1e9, torch="2.13") / MANIFEST
    original = store.read_manifest(1)
    content = bytearray(path.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    try:
        store.check(1)
    except CheckpointError:
        return
    assert store.read_manifest(1) == original  # a blank, say, that means nothing


def test_a_checkpoint_without_a_manifest_is_not_believed(store: Store) -> None:
    (commit(store, 7) / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match=r"step_00000007 has no manifest.json"):
        store.check(7)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "3", '"text"', "{}", '{"format": 1}', '{"format": 1, "files": []}', "\x00\x00"]
)
def test_a_torn_manifest_is_not_believed(store: Store, text: str) -> None:
    (commit(store, 7) / MANIFEST).write_text(text)
    with pytest.raises(CheckpointError, match="step_00000007"):
        store.check(7)


def test_a_manifest_that_is_not_text_is_not_believed(store: Store) -> None:
    (commit(store, 7) / MANIFEST).write_bytes(b"\xff\xfe\xfd")
    with pytest.raises(CheckpointError, match=r"step_00000007/manifest.json cannot be read"):
        store.check(7)


def test_every_prefix_of_a_manifest_is_not_believed(store: Store) -> None:
    """Torn anywhere."""
    path = commit(store, 7) / MANIFEST
    text = path.read_text()
    for length in range(len(text)):
        path.write_text(text[:length])
        with pytest.raises(CheckpointError):
            store.check(7)


def test_another_format_is_named_with_the_checkpoint_and_what_is_known(store: Store) -> None:
    path = commit(store, 7) / MANIFEST
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 2}))
    with pytest.raises(CheckpointError, match="its format is 2; this keepstep reads format 1") as error:
        store.check(7)
    assert "step_00000007" in str(error.value)


@pytest.mark.parametrize(
    "name",
    ["../secret", "/etc/passwd", "sub/file", "./state.json", "..", ".", "", "a\0b", "..\\x", "C:x", "x" * 300, "é"],
)
def test_a_manifest_cannot_reach_outside(store: Store, name: str) -> None:
    """Its checksum is right: anybody can compute it."""
    folder = commit(store, 7)
    (store.root / "secret").write_bytes(b"x")
    files = {name: FileRecord(1, digest(store.root / "secret"))}
    (folder / MANIFEST).write_text(Manifest(7, 0, 1, "single", files=files).to_json())
    with pytest.raises(CheckpointError, match="outside"):
        store.check(7)


def test_workers_share_the_checking_and_together_check_everything(store: Store) -> None:
    content = {f"rank_{rank:05d}": bytes([rank]) for rank in range(5)}
    for number, damaged in enumerate(content):
        folder = commit(store, 7, content)
        (folder / damaged).unlink()
        for part in range(3):
            if part == number % 3:
                with pytest.raises(CheckpointError, match=damaged):
                    store.check(7, part, 3)
            else:
                store.check(7, part, 3)


def test_a_manifest_survives_its_text() -> None:
    manifest = Manifest(5, 2, 4, "fsdp2", {"a": FileRecord(3, "ff")}, {"loss": 0.1}, 1.5, "2.13")
    assert Manifest.from_json(manifest.to_json()) == manifest


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_manifest_is_standard_json_whatever_the_metrics(value: float) -> None:
    """A diverged run's manifest can be read by other tools too."""

    def refuse(word: str) -> None:
        pytest.fail(f"{word} is not JSON")

    json.loads(Manifest(1, 0, 1, "single", metrics={"loss": value}).to_json(), parse_constant=refuse)


def test_a_bad_checkpoint_is_replaced_by_a_good_one_of_its_step(store: Store) -> None:
    (commit(store, 7) / "state.json").unlink()
    commit(store, 7)
    store.check(7)


def test_a_crash_before_the_rename_leaves_nothing_to_see(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(self: Path, target: Path) -> None:
        raise OSError("power cut")

    monkeypatch.setattr(Path, "rename", crash)
    with pytest.raises(OSError, match="power cut"):
        commit(store, 7)
    assert store.steps() == []
    monkeypatch.undo()
    store.sweep()
    assert list(store.root.iterdir()) == []


def test_the_manifest_is_written_last_and_everything_is_synced(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    real = os.fsync

    def note(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    commit(store, 7)
    assert synced[0].startswith(f".{MANIFEST}-")
    assert synced[1].startswith(".writing-step_00000007")
    assert synced[2] == store.root.name


def test_pruning_keeps_the_newest(store: Store) -> None:
    for step in (1, 2, 3, 4):
        commit(store, step)
    assert store.prune() == [1, 2]
    assert store.steps() == [3, 4]
    assert sorted(path.name for path in store.root.iterdir()) == ["step_00000003", "step_00000004"]


def test_pruning_keeps_the_best(store: Store) -> None:
    for step in (1, 2, 3, 4):
        commit(store, step)
    store.remember_best(1, "accuracy", 0.9)
    assert store.prune() == [2]
    assert store.steps() == [1, 3, 4]
    store.remember_best(4, "accuracy", 0.95)
    assert store.prune() == [1]
    assert store.steps() == [3, 4]


@given(st.sets(st.integers(0, 50), min_size=1, max_size=12), st.integers(1, 5), st.none() | st.integers(0, 50))
def test_whatever_is_pruned_the_newest_and_the_best_stay(
    tmp_path_factory: pytest.TempPathFactory, steps: set[int], keep: int, best: int | None
) -> None:
    store = Store(tmp_path_factory.mktemp("store"), keep)
    for step in steps:
        store.path(step).mkdir()
    if best is not None:
        store.remember_best(best, "m", 1.0)
    gone = store.prune()
    expected = set(sorted(steps)[-keep:]) | ({best} & steps)
    assert set(store.steps()) == expected
    assert set(gone) == steps - expected
    assert store.prune() == []


def test_a_reader_never_meets_a_checkpoint_that_is_half_gone(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2, 3):
        commit(store, step)
    seen: list[list[int]] = []

    def look(path: Path, **_: Any) -> None:
        seen.append(store.steps())

    monkeypatch.setattr(shutil, "rmtree", look)
    store.prune()
    assert seen == [[2, 3]]


def test_the_best_is_remembered(store: Store) -> None:
    assert store.best() is None
    store.remember_best(30, "accuracy", 0.5)
    assert store.best() == {"step": 30, "metric": "accuracy", "value": 0.5}
    (store.root / "best.json").write_text('{"step": 3')
    assert store.best() is None


def test_what_is_later_than_the_step_resumed_from_is_set_aside(store: Store) -> None:
    for step in (1, 2, 3):
        commit(store, step)
    store.remember_best(3, "accuracy", 0.5)
    store.set_aside_after(2)
    assert store.steps() == [1, 2]
    (aside,) = store.root.glob("damaged-step_00000003-*")
    assert (aside / "manifest.json").exists()
    assert store.best() is None


def test_a_best_that_is_not_later_is_kept(store: Store) -> None:
    commit(store, 2)
    store.remember_best(2, "accuracy", 0.5)
    store.set_aside_after(2)
    assert store.best() == {"step": 2, "metric": "accuracy", "value": 0.5}


def test_sweeping_takes_what_interrupted_writes_left_and_nothing_else(store: Store) -> None:
    commit(store, 1)
    store.remember_best(1, "m", 0.0)
    left = store.begin(2, "dead")
    (left / "rank_00000.safetensors").write_bytes(b"half")
    store.sweep()
    assert sorted(path.name for path in store.root.iterdir()) == ["best.json", "step_00000001"]


@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 40])
def test_a_digest_covers_the_whole_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    import xxhash

    monkeypatch.setattr(store_module, "_CHUNK", 16)
    data = bytes(range(size))
    (tmp_path / "file").write_bytes(data)
    assert digest(tmp_path / "file") == xxhash.xxh3_128(data).hexdigest()
    assert record(tmp_path / "file").bytes == size


def test_a_durable_write_replaces_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_durably(path, "old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_durably(path, "new and longer")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
