"""`keepstep runs` and `keepstep show` tell what the run folders say, and change nothing in them."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from keepstep.errors import ConfigError, RunFolderError
from keepstep.folder import RunFolder
from keepstep.show import existing_run, print_run, print_runs, status_of, total_ledger

SETTINGS = {"workers": 2, "strategy": "ddp", "precision": "bf16", "keep_best": None, "seed": 0}


def make_run(storage: Path, name: str, status: str | None = "finished", step: int = 9, **result: Any) -> RunFolder:
    folder = RunFolder(storage, name)
    folder.create()
    folder.write_config({"settings": SETTINGS, "script": "train.py", "arguments": ["--lr", "[x]"]})
    folder.metrics.write_text('{"step": 8, "loss": 0.5}\n{"step": 9, "epoch": 1, "loss": 0.25, "accuracy": "nan"}\n')
    if status is not None:
        folder.write_result({"status": status, "step": step, **result})
    return folder


def text_of(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def test_runs_are_listed_the_newest_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    old = make_run(tmp_path, "old", "failed", step=3)
    make_run(tmp_path, "new")
    (tmp_path / "notes").mkdir()
    (tmp_path / "file").write_text("")
    for entry in old.path.iterdir():
        os.utime(entry, (time.time() - 7200, time.time() - 7200))
    assert print_runs(tmp_path) == 0
    lines = text_of(capsys)
    assert lines[0] == "run status step workers metrics last change"
    assert lines[1] == "new finished 9 2 ddp loss 0.25 accuracy nan 0 s ago"
    assert lines[2] == "old failed 3 2 ddp loss 0.25 accuracy nan 2 h ago"
    assert len(lines) == 3


def test_no_runs_says_how_to_make_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert print_runs(tmp_path / "none") == 0
    assert capsys.readouterr().out == f"no runs in {tmp_path}/none; keepstep run SCRIPT makes one\n"


def test_a_run_that_is_not_there_is_answered_with_those_that_are(tmp_path: Path) -> None:
    make_run(tmp_path, "vit")
    with pytest.raises(
        RunFolderError, match=r"there is no run 'vti' in .*; there are: vit \(another folder: --storage\)"
    ):
        existing_run(tmp_path, "vti")
    with pytest.raises(RunFolderError, match="there are: none"):
        existing_run(tmp_path / "empty", "vit")
    assert existing_run(tmp_path, "vit").name == "vit"


def test_a_name_that_leaves_the_storage_is_refused(tmp_path: Path) -> None:
    make_run(tmp_path, "vit")
    with pytest.raises(ConfigError, match="is not a plain name"):
        existing_run(tmp_path / "other", "../vit")


def test_the_status_is_that_of_now(tmp_path: Path) -> None:
    assert status_of(make_run(tmp_path, "a", "stopped")) == "stopped"
    died = make_run(tmp_path, "b", None)
    assert status_of(died) == "interrupted"
    died.hold()
    assert status_of(RunFolder(tmp_path, "b")) == "running"
    died.release()


def test_a_run_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path, "vit")
    folder.event("resumed", step=4)
    folder.event("checkpoint_passed_over", problem="step_00000005/state.json is missing")
    failures = [
        {"rank": 1, "step": 6, "cause": "SIGKILL", "message": ""},
        {"rank": 0, "step": 6, "cause": "RuntimeError", "message": "[gloo] closed"},
    ]
    folder.event("failed", failures=failures, retry=True, reason="failure 1 of 3 forgiven")
    folder.event("finished", step=9)
    folder.event("ended", seconds={"step": 60.0, "start": 20.0})
    folder.event("ended", seconds={"step": 20.0})
    for step in (5, 9):
        (folder.checkpoints / f"step_{step:08d}").mkdir(parents=True)
    assert print_run(tmp_path, "vit") == 0
    lines = text_of(capsys)
    assert lines[0] == f"vit finished, in {folder.path}"
    assert "script train.py --lr [x]" in lines
    assert "settings workers=2 strategy=ddp precision=bf16" in lines
    assert "step 9" in lines and "metrics loss 0.25 accuracy nan" in lines and "checkpoints 5, 9" in lines
    events = [line.partition(" ")[2] for line in lines if line[2:3] == ":"]
    assert events == [
        "resumed from step 4",
        "passed over: step_00000005/state.json is missing",
        "failed: rank 1 at step 6: SIGKILL",
        "then: rank 0 at step 6: RuntimeError [gloo] closed",
        "failure 1 of 3 forgiven",
        "finished at step 9",
    ]
    assert "where the time went (100.0 s, 80% of it new steps)" in lines
    assert lines[-2:] == ["training 80.0 s 80.0%", "starting up 20.0 s 20.0%"]


def test_a_run_that_has_only_begun_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    RunFolder(tmp_path, "young").create()
    assert print_run(tmp_path, "young") == 0
    lines = text_of(capsys)
    assert lines[0].startswith("young interrupted, in ")
    assert "step 0" in lines and "metrics none yet" in lines and "checkpoints none" in lines


def test_a_path_is_no_mark_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    storage = tmp_path / "runs [old]"
    make_run(storage, "vit")
    print_run(storage, "vit")
    assert f"in {storage}/vit" in capsys.readouterr().out


def test_time_of_all_launches_counts_or_else_of_the_result() -> None:
    events = [
        {"event": "ended", "seconds": {"step": 1.0, "data": 2.0}},
        {"event": "x"},
        {"event": "ended", "seconds": {}},
    ]
    assert total_ledger(events, {"seconds": {"step": 100.0}}).total_s == 3.0
    assert total_ledger([], {"seconds": {"step": 100.0}}).total_s == 100.0
    assert total_ledger([], {}).total_s == 0.0


HOSTILE = {
    "config": ("config.json", "[1,2,3]"),
    "arguments": ("config.json", '{"arguments": 3}'),
    "deep": ("result.json", "[" * 200_000),
    "metrics": ("result.json", '{"metrics": []}'),
    "values": ("metrics.jsonl", '{"step": 1, "loss": []}'),
    "bytes": ("metrics.jsonl", "\x1b[2J\x00\x07"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_bad_run_is_one_row_and_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    make_run(tmp_path, "good")
    name, text = HOSTILE[case]
    (make_run(tmp_path, "bad").path / name).write_text(text)
    assert print_runs(tmp_path) == 0
    lines = text_of(capsys)
    (row,) = (line for line in lines if line.startswith("bad "))
    assert row.startswith(f"bad unreadable {tmp_path}/bad/{name} ") and row.isprintable()
    assert any(line.startswith("good finished 9") for line in lines)
    with pytest.raises(RunFolderError, match=name):
        print_run(tmp_path, "bad")


@pytest.mark.parametrize(
    "event",
    [
        {"event": "resumed"},
        {"event": "ended", "time": None},
        {"event": "failed", "failures": 3},
        {"event": "ended", "seconds": []},
        {"event": "ended", "seconds": {"step": "x"}},
        {"event": "finished", "step": 1, "time": 1e300},
    ],
    ids=str,
)
def test_an_event_that_cannot_be_shown_is_named(tmp_path: Path, event: dict[str, Any]) -> None:
    folder = make_run(tmp_path, "bad")
    folder.event(**{"kind": event["event"], **{key: value for key, value in event.items() if key != "event"}})
    with pytest.raises(
        RunFolderError, match=r"events.jsonl has (an event that keepstep did not write|a line that is no event)"
    ):
        print_run(tmp_path, "bad")


def test_what_files_say_cannot_rewrite_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path, "vit", "fini\x1b[2Jshed")
    folder.write_config({"settings": {"strategy": "\x1b[2J"}, "script": "\x1b[2J.py", "arguments": ["\x1b[2J"]})
    folder.metrics.write_text('{"lo\\u001b[2Jss": 1}\n')
    folder.event("checkpoint_passed_over", problem="\x1b[2J")
    print_runs(tmp_path)
    print_run(tmp_path, "vit")
    assert "\x1b" not in capsys.readouterr().out


def test_in_an_object_store_events_tell_the_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files say when they were fetched."""
    memory = pytest.importorskip("fsspec.implementations.memory")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("KEEPSTEP_CACHE", str(tmp_path))
    for name, hours in (("older", 3), ("newer", 1)):
        folder = make_run("memory://bucket/runs", name)  # type: ignore[arg-type]
        folder.event("finished", step=9, time=time.time() - 3600 * hours)
        folder.push()
    try:
        print_runs("memory://bucket/runs")
    finally:
        memory.MemoryFileSystem.store.clear()
        memory.MemoryFileSystem.pseudo_dirs[:] = [""]
    rows = text_of(capsys)[1:]
    assert [(row.split()[0], row[-7:]) for row in rows] == [("newer", "1 h ago"), ("older", "3 h ago")]


def test_showing_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path, "vit")
    before = sorted(path.name for path in folder.path.iterdir())
    print_runs(tmp_path)
    print_run(tmp_path, "vit")
    assert sorted(path.name for path in folder.path.iterdir()) == before
