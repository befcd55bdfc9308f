"""A run's copy in an object store: a manifest there means a whole checkpoint there, whatever is interrupted when."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from keepstep.checkpoint.mirror import HOLDER, Mirror
from keepstep.checkpoint.remote import Remote
from keepstep.checkpoint.store import FetchingStore, Manifest, Store, newest_first, record
from keepstep.checkpoint.upload import upload
from keepstep.errors import CheckpointError, StorageError

memory = pytest.importorskip("fsspec.implementations.memory")

CONTENT = {"rank_00000.safetensors": bytes(range(200)), "state.json": b"{}", "tensors.json": b"[]"}


class Recorder(Remote):
    """Notes what is written and deleted, in order, and fails when told."""

    def __init__(self) -> None:
        super().__init__(memory.MemoryFileSystem(), "/bucket/run", "memory://bucket/run")
        self.done: list[str] = []
        self.fails_at = ""

    def put(self, local: Path, key: str) -> None:
        self._note(f"put {key}")
        super().put(local, key)

    def write(self, key: str, content: bytes) -> None:
        self._note(f"put {key}")
        super().write(key, content)

    def delete(self, *keys: str) -> None:
        for key in keys:
            self._note(f"delete {key}")
        super().delete(*keys)

    def _note(self, what: str) -> None:
        if self.fails_at and self.fails_at in what:
            raise StorageError(f"{what} failed")
        self.done.append(what)


@pytest.fixture(autouse=True)
def _empty() -> Iterator[None]:
    yield
    memory.MemoryFileSystem.store.clear()
    memory.MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.fixture
def remote() -> Recorder:
    return Recorder()


def machine(remote: Remote, folder: Path, keep: int = 2) -> Store:
    folder.mkdir(parents=True, exist_ok=True)
    return Store(folder / "checkpoints", keep, Mirror(remote, folder, folder / ".holder"))


def save(store: Store, step: int, content: dict[str, bytes] = CONTENT) -> None:
    folder = store.begin(step, "nonce")
    for name, data in content.items():
        (folder / name).write_bytes(data)
    files = {name: record(folder / name) for name in content}
    store.commit(folder, Manifest(step, 0, 1, "single", files=files))
    assert store.mirror is not None
    upload(store, store.mirror, step, folder, 0, None)
    store.prune()


def test_a_checkpoint_goes_there_with_its_manifest_last(remote: Recorder, tmp_path: Path) -> None:
    store = machine(remote, tmp_path)
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    save(store, 5)
    puts = [what.removeprefix("put ") for what in remote.done]
    assert puts[0] == "checkpoints/step_00000005/rank_00000.safetensors"
    assert puts[-2:] == ["metrics.jsonl", "checkpoints/step_00000005/manifest.json"]
    assert len(puts) == 5 and store.mirror is not None and store.mirror.steps() == [5]


@pytest.mark.parametrize("what", ["rank_00000", "state.json", "tensors.json", "metrics.jsonl", "manifest.json"])
def test_an_upload_that_fails_anywhere_leaves_no_checkpoint_there_and_a_whole_one_here(
    remote: Recorder, tmp_path: Path, what: str
) -> None:
    store = machine(remote, tmp_path)
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    remote.fails_at = f"put {'' if what == 'metrics.jsonl' else 'checkpoints/step_00000005/'}{what}"
    with pytest.raises(CheckpointError, match=f"step 5 could not be uploaded: put .*{what}.* failed; what was written"):
        save(store, 5)
    assert store.mirror is not None and store.mirror.steps() == []
    store.check(5)
    remote.fails_at = ""
    store.mirror.publish(store.path(5), 2, None)
    assert store.mirror.steps() == [5]
    done = len(remote.done)
    store.mirror.publish(store.path(5), 2, None)
    assert len(remote.done) == done, "what is there is not uploaded again"


def test_a_file_that_did_not_arrive_whole_stops_the_commit(remote: Recorder, tmp_path: Path) -> None:
    store = machine(remote, tmp_path)
    folder = store.begin(5, "nonce")
    (folder / "rank_00000.safetensors").write_bytes(b"12345")
    store.commit(
        folder, Manifest(5, 0, 1, "single", files={"rank_00000.safetensors": record(folder / "rank_00000.safetensors")})
    )
    assert store.mirror is not None
    remote.write("checkpoints/step_00000005/rank_00000.safetensors", b"123")
    with pytest.raises(StorageError, match="is not what was uploaded: 3 bytes"):
        store.mirror.commit(store.path(5), 2, None)
    assert store.mirror.steps() == []


def test_another_machine_fetches_what_it_lacks_and_only_that(remote: Recorder, tmp_path: Path) -> None:
    save(machine(remote, tmp_path / "a"), 5)
    other = machine(remote, tmp_path / "b")
    assert list(newest_first(other)) == [5] and other.steps() == []
    other.path(5).mkdir(parents=True)
    (other.path(5) / "state.json").write_bytes(CONTENT["state.json"])
    (other.path(5) / "tensors.json").write_bytes(b"other")
    got: list[str] = []
    real = remote.get
    remote.get = lambda key, local: (got.append(Path(key).name), real(key, local))  # type: ignore[method-assign,assignment,return-value]
    other.fetch(5)
    other.check(5)
    assert sorted(got) == ["rank_00000.safetensors", "tensors.json"]
    assert sorted(path.name for path in other.path(5).iterdir()) == sorted([*CONTENT, "manifest.json"])


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda remote, key: remote.write(key, remote.read(key)[:-1]), "has 199 bytes; 200 were written, in memory://"),
        (lambda remote, key: remote.write(key, b"\x01" + remote.read(key)[1:]), "is damaged: its checksum differs, in"),
        (lambda remote, key: remote.delete(key), "is missing, in memory://bucket/run"),
    ],
    ids=["truncated", "flipped", "deleted"],
)
def test_damage_there_is_named_and_leaves_nothing_here(
    remote: Recorder, tmp_path: Path, damage: Any, complaint: str
) -> None:
    save(machine(remote, tmp_path / "a"), 5)
    damage(remote, "checkpoints/step_00000005/rank_00000.safetensors")
    other = machine(remote, tmp_path / "b")
    with pytest.raises(CheckpointError) as error:
        other.fetch(5)
    assert f"step_00000005/rank_00000.safetensors {complaint}" in str(error.value)
    assert not other.path(5).exists()


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"format": 1}', b"\xff"])
def test_a_torn_manifest_there_is_not_believed(remote: Recorder, tmp_path: Path, text: bytes) -> None:
    save(machine(remote, tmp_path / "a"), 5)
    remote.write("checkpoints/step_00000005/manifest.json", text)
    with pytest.raises(CheckpointError, match=r"step_00000005/manifest.json cannot be"):
        machine(remote, tmp_path / "b").fetch(5)


def test_a_manifest_that_is_no_object_is_called_that(remote: Recorder, tmp_path: Path) -> None:
    save(machine(remote, tmp_path / "a"), 5)
    remote.write("checkpoints/step_00000005/manifest.json", b"[]")
    with pytest.raises(CheckpointError, match=r"manifest.json cannot be used: it is \[\]; an object was expected"):
        machine(remote, tmp_path / "b").fetch(5)


@pytest.mark.parametrize("what", ["manifest.json", "rank_00000.safetensors"])
def test_what_is_whole_here_stands_in_for_what_is_damaged_there(remote: Recorder, tmp_path: Path, what: str) -> None:
    store = machine(remote, tmp_path / "a")
    save(store, 5)
    key = f"checkpoints/step_00000005/{what}"
    good = remote.read(key)
    remote.write(key, b"damaged")
    store.fetch(5)
    store.check(5)
    assert store.mirror is not None
    if what == "manifest.json":
        store.mirror.publish(store.path(5), 2, None)
        assert remote.read(key) == good, "it is uploaded again"


def test_old_ones_go_manifest_first_and_the_best_stays(remote: Recorder, tmp_path: Path) -> None:
    store = machine(remote, tmp_path)
    save(store, 1)
    store.remember_best(1, "accuracy", 0.9)
    for step in (2, 3, 4):
        save(store, step)
    assert store.mirror is not None and store.mirror.steps() == [1, 3, 4]
    assert store.steps() == [1, 4], "here only the newest, and the best"
    deleted = [what for what in remote.done if what.startswith("delete")]
    assert deleted[0] == "delete checkpoints/step_00000002/manifest.json" and len(deleted) == 4


def test_old_ones_that_cannot_be_deleted_do_not_end_the_run(
    remote: Recorder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = machine(remote, tmp_path, keep=1)
    remote.fails_at = "delete"
    for step in (1, 2, 3):
        save(store, step)
    assert store.mirror is not None and store.mirror.steps() == [1, 2, 3]
    assert capsys.readouterr().err.count("old checkpoints stay: ") == 1


def test_leftovers_are_swept_and_bad_ones_set_aside(remote: Recorder, tmp_path: Path) -> None:
    store = machine(remote, tmp_path, keep=9)
    for step in (1, 2, 3):
        save(store, step)
    remote.delete("checkpoints/step_00000002/manifest.json")
    remote.write("checkpoints/best.json", b"{}")
    assert store.mirror is not None
    store.mirror.set_aside_after(1)
    store.mirror.sweep()
    left = sorted(key.removeprefix("checkpoints/") for key in remote.sizes())
    assert [key for key in left if key.startswith("step_00000001")] and "best.json" not in left
    assert not [key for key in left if key.startswith("step_00000002")], "it had no manifest"
    assert "step_00000003/damaged-manifest.json" in left and "step_00000003/state.json" in left
    assert store.mirror.steps() == [1]
    save(store, 3)
    assert store.mirror.steps() == [1, 3]
    assert "checkpoints/step_00000003/damaged-manifest.json" not in remote.sizes()


def test_small_files_follow_whoever_is_ahead(remote: Recorder, tmp_path: Path) -> None:
    here, there = tmp_path / "a", tmp_path / "b"
    store = machine(remote, here)
    (here / "metrics.jsonl").write_text("1\n")
    (here / "artifacts").mkdir()
    (here / "artifacts" / "note.txt").write_text("n")
    (here / "artifacts" / ".writing-note.txt").write_text("half a n")
    (here / "logs").mkdir()
    (here / "logs" / "rank_0.txt").write_text("hello")
    save(store, 1)
    other = machine(remote, there)
    assert store.mirror is not None and other.mirror is not None
    other.mirror.fetch_files(other.steps())
    assert (there / "metrics.jsonl").read_text() == "1\n"
    assert remote.read("artifacts/note.txt") == b"n" and remote.read("logs/rank_0.txt") == b"hello"
    assert not remote.exists("artifacts/.writing-note.txt")
    assert (there / "logs" / "rank_0.txt").read_text() == "hello", "it is appended to, and uploaded again, from here"
    (there / "logs" / "rank_0.txt").write_text("hello, more")
    other.mirror.fetch_files(other.steps())
    assert (there / "logs" / "rank_0.txt").read_text() == "hello, more"
    other.fetch(1)
    (there / "metrics.jsonl").write_text("1\n2\n")
    other.mirror.fetch_files(other.steps())
    assert (there / "metrics.jsonl").read_text() == "1\n2\n", "nobody is ahead of it"
    save(other, 2)
    store.mirror.fetch_files(store.steps())
    assert (here / "metrics.jsonl").read_text() == "1\n2\n"
    done = len(remote.done)
    other.mirror.push_files()
    assert len(remote.done) == done, "what has not changed is not uploaded again"


def test_what_sinks_need_to_go_on_elsewhere_follows_too(remote: Recorder, tmp_path: Path) -> None:
    here, there = tmp_path / "a", tmp_path / "b"
    store = machine(remote, here)
    board = "tensorboard/again_2/events.out.tfevents.1.host.7.0"
    (here / board).parent.mkdir(parents=True)
    (here / board).write_bytes(b"values")
    (here / "sinks.json").write_text("{}")
    save(store, 1)
    remote.write("tensorboard/../../evil", b"")
    remote.write("tensorboard/events.out.tfevents.1/../../evil", b"")
    other = machine(remote, there)
    assert other.mirror is not None
    other.mirror.fetch_files(other.steps())
    assert (there / board).read_bytes() == b"values" and (there / "sinks.json").read_text() == "{}"
    assert not list(tmp_path.rglob("evil"))


def test_a_run_that_was_taken_over_commits_nothing(remote: Recorder, tmp_path: Path) -> None:
    store = machine(remote, tmp_path)
    (tmp_path / ".holder").write_text("mine")
    remote.write(HOLDER, b'{"mark": "mine", "who": "me"}')
    save(store, 1)
    remote.write(HOLDER, b'{"mark": "other", "who": "process 1 on elsewhere"}')
    before = remote.sizes()
    with pytest.raises(CheckpointError, match="was taken over by process 1 on elsewhere"):
        save(store, 2)
    assert remote.sizes() == before, "nothing of the other's is overwritten"
    assert store.mirror is not None and store.mirror.steps() == [1]


def test_commands_that_look_see_and_fetch_what_is_there(remote: Recorder, tmp_path: Path) -> None:
    save(machine(remote, tmp_path / "a"), 5)
    other = machine(remote, tmp_path / "b")
    looking = FetchingStore(other.root, 1, other.mirror)
    assert looking.steps() == [5]
    looking.check(5)
    assert other.steps() == [5]
