"""The run folder: one holder at a time, and files that a crash cannot make unreadable."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any

import pytest

from keepstep.errors import RunFolderError
from keepstep.folder import RunFolder, read_lines


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "runs", "vit")
    folder.create()
    return folder


def test_a_folder_is_made_with_what_stands_above_it(folder: RunFolder, tmp_path: Path) -> None:
    assert folder.path == tmp_path / "runs" / "vit"
    assert folder.logs.is_dir()
    assert [entry.name for entry in folder.path.iterdir()] == ["logs"], "the probe is gone"
    folder.create()


def test_storage_may_begin_at_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert RunFolder("~/runs", "a").path == tmp_path / "runs" / "a"


def test_a_place_that_cannot_be_written_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError) as error:
        RunFolder(tmp_path / "file", "vit").create()
    assert f"the run folder {tmp_path}/file/vit cannot be written" in str(error.value)
    assert "give another one with --storage" in str(error.value)


def test_one_process_holds_a_run(folder: RunFolder, tmp_path: Path) -> None:
    assert not folder.is_held()
    folder.hold()
    other = RunFolder(tmp_path / "runs", "vit")
    assert other.is_held()
    with pytest.raises(RunFolderError) as error:
        other.hold()
    assert f"run 'vit' is running already, in process {os.getpid()} on " in str(error.value)
    assert "wait for it, stop it, or give another --name" in str(error.value)
    folder.release()
    folder.release()
    assert not other.is_held()
    other.hold()
    other.release()


def test_a_holder_that_died_holds_nothing(folder: RunFolder) -> None:
    (folder.path / ".lock").write_text("process 1 on a machine that is gone")
    folder.hold()
    assert (folder.path / ".lock").read_text().startswith(f"process {os.getpid()} on ")
    folder.release()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")
def test_what_a_killed_process_was_writing_goes(folder: RunFolder) -> None:
    folder.create()
    folder.write_config({"seed": 1})
    (folder.artifacts / "plots").mkdir(parents=True)
    leftovers = [
        folder.path / ".config.json-0123abcd",
        folder.path / ".result.json-0123abcd",
        folder.artifacts / "plots" / ".writing-loss.png",
    ]
    for leftover in leftovers:
        leftover.touch()
    folder.hold()
    assert not any(leftover.exists() for leftover in leftovers)
    assert folder.read_config() == {"seed": 1}
    folder.release()


def test_a_process_that_the_holder_started_does_not_hold(folder: RunFolder, tmp_path: Path) -> None:
    """DataLoader's workers outlive, for some seconds, a run that is killed: it must be possible to go on at once."""
    folder.hold()
    wait, go = os.pipe()
    child = os.fork()
    if not child:
        os.close(go)
        os.read(wait, 1)
        os._exit(0)
    deadline = time.monotonic() + 2
    folder.release()  # as the death of the holder does
    try:
        other = RunFolder(tmp_path / "runs", "vit")
        while other.is_held() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not other.is_held()
    finally:
        os.close(go)
        os.waitpid(child, 0)
        os.close(wait)


def test_a_folder_that_is_not_there_is_not_held(tmp_path: Path) -> None:
    assert not RunFolder(tmp_path, "nothing").is_held()
    assert list(tmp_path.iterdir()) == []


def test_looking_whether_it_is_held_writes_nothing(folder: RunFolder) -> None:
    """`keepstep show` reads, in folders of other people too."""
    folder.is_held()
    assert [entry.name for entry in folder.path.iterdir()] == ["logs"]


def test_events_are_appended(folder: RunFolder) -> None:
    assert folder.read_events() == []
    folder.event("started", step=0)
    folder.event("checkpoint", step=5, where=Path("x"))
    events = folder.read_events()
    assert [(event["event"], event["step"]) for event in events] == [("started", 0), ("checkpoint", 5)]
    assert events[1]["where"] == "x"
    assert events[0]["time"] <= events[1]["time"]


def test_a_line_that_a_crash_cut_short_is_passed_over(folder: RunFolder) -> None:
    folder.event("started")
    with folder.events.open("a") as file:
        file.write('{"time": 1.0, "eve')
    assert [event["event"] for event in folder.read_events()] == ["started"]


def test_events_after_a_line_that_was_cut_short_are_read(folder: RunFolder) -> None:
    """The disk was full, or the power went: the next launch must still be able to read, and to resume."""
    folder.event("started")
    with folder.events.open("a") as file:
        file.write('{"time": 1.0, "eve')
    folder.event("resumed")
    assert [event["event"] for event in folder.read_events()] == ["started", "resumed"]


def test_a_whole_line_that_is_not_json_is_an_error_that_shows_it(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"a": 1}\nnot json\n')
    with pytest.raises(RunFolderError, match=r"events.jsonl has a line that is not JSON: 'not json\\n'"):
        list(read_lines(path))


def test_config_and_result_come_back(folder: RunFolder) -> None:
    assert folder.read_config() == {} and folder.read_result() == {} and not folder.finished
    folder.write_config({"settings": {"storage": Path("runs")}})
    assert folder.read_config() == {"settings": {"storage": "runs"}}
    folder.write_result({"status": "failed", "step": 3})
    assert folder.read_result() == {"status": "failed", "step": 3} and not folder.finished
    folder.write_result({"status": "finished", "step": 9})
    assert folder.finished


def test_a_refused_run_takes_back_what_it_made_and_no_more(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    folder = RunFolder(tmp_path / "runs", "vit")
    folder.create()
    folder.hold()
    folder.withdraw()
    folder.release()
    assert list(tmp_path.rglob("*")) == [tmp_path / "runs"]
    folder.create()
    folder.event("started")
    folder.withdraw()
    assert folder.events.exists(), "something came of it"
    again = RunFolder(tmp_path / "runs", "vit")
    folder.events.unlink()
    again.create()
    again.withdraw()
    assert folder.logs.is_dir(), "another process made it"


DEEP = "[" * 200_000
HOSTILE = {
    "config.json": ["[1,2,3]", '{"arguments": 3}', '{"settings": []}', '{"script": null}', DEEP, "\0"],
    "result.json": [
        "[]",
        DEEP,
        '{"status": []}',
        '{"step": "x"}',
        *(f'{{"metrics": {value}}}' for value in ("[]", "null", "3", '"x"', '{"loss": {}}', '{"loss": "x"}')),
    ],
    "events.jsonl": [
        "3",
        DEEP,
        '{"event": "started"}',
        '{"time": 1.0}',
        '{"time": "now", "event": "started"}',
        '{"time": 1.0, "event": "finished", "metrics": []}',
    ],
    "metrics.jsonl": ["3", "[]", DEEP],
}


def read_all(folder: RunFolder) -> None:
    folder.read_config(), folder.read_result(), folder.read_events(), folder.read_metrics()


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in HOSTILE.items() for text in texts])
def test_a_file_that_is_not_ours_is_named_in_one_line(folder: RunFolder, name: str, text: str) -> None:
    (folder.path / name).write_text(text)
    with pytest.raises(RunFolderError) as error:
        read_all(folder)
    assert str(folder.path / name) in str(error.value)
    assert len(str(error.value)) < 400 and "\n" not in str(error.value)


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_no_regular_file_is_not_waited_for(folder: RunFolder, name: str) -> None:
    os.mkfifo(folder.path / name)
    os.mkfifo(folder.path / ".lock")
    assert not folder.is_held()
    with pytest.raises(RunFolderError, match="is not a regular file"):
        read_all(folder)
    (folder.path / name).unlink()
    (folder.path / name).mkdir()
    with pytest.raises(RunFolderError, match="is not a regular file"):
        read_all(folder)


def test_random_bytes_are_not_printed(folder: RunFolder) -> None:
    folder.events.write_bytes(b"\x1b[2J\xff\x90" * 100)
    with pytest.raises(RunFolderError) as error:
        folder.read_events()
    assert str(error.value).isascii() and str(error.value).isprintable()


def test_a_result_that_is_not_json_is_named(folder: RunFolder) -> None:
    (folder.path / "result.json").write_text("{")
    with pytest.raises(RunFolderError, match=r"result.json is not JSON"):
        folder.read_result()


def test_metrics_are_read(folder: RunFolder) -> None:
    folder.metrics.write_text('{"step": 1, "loss": "nan"}\n{"step": 2}\n')
    assert folder.read_metrics() == [{"step": 1, "loss": "nan"}, {"step": 2}]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_written_is_standard_json_whatever_the_metrics(folder: RunFolder, value: float) -> None:
    """As in metrics.jsonl: a diverged run can be read by a browser, jq and the like."""
    metrics: dict[str, Any] = {"metrics": {"loss": value}}
    folder.event("finished", **metrics)
    folder.write_result(metrics)
    for path in (folder.events, folder.path / "result.json"):
        found = json.loads(path.read_text(), parse_constant=pytest.fail)
        assert str(float(found["metrics"]["loss"])) == str(value)
