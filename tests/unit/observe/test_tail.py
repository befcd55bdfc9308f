"""What a supervisor sees of a run folder as it grows."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepstep.folder import RunFolder
from keepstep.observe.tail import News, Tail

MARK = "this worker failed:"


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path, "run")
    folder.create()
    return folder


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def printed(folder: RunFolder, text: str) -> None:
    append(folder.logs / "rank_0.txt", text)


def test_only_what_is_new_is_news(folder: RunFolder) -> None:
    printed(folder, "from an earlier launch\n")
    append(folder.metrics, '{"step": 1}\n')
    folder.event("old")
    tail = Tail(folder, MARK)
    assert tail.read() == News("", [], [])
    printed(folder, "epoch 1\n")
    append(folder.metrics, '{"step": 2}\n{"step": 3}\n')
    folder.event("new")
    news = tail.read()
    assert news.output == "epoch 1\n"
    assert news.metrics == [{"step": 2}, {"step": 3}]
    assert [event["event"] for event in news.events] == ["new"]
    assert tail.read() == News("", [], [])


def test_files_that_are_not_there_yet_are_waited_for(folder: RunFolder) -> None:
    tail = Tail(folder, MARK)
    assert tail.read() == News("", [], [])
    append(folder.metrics, '{"step": 1}\n')
    assert tail.read().metrics == [{"step": 1}]


def test_a_line_is_news_when_it_is_whole(folder: RunFolder) -> None:
    tail = Tail(folder, MARK)
    append(folder.metrics, '{"step": 1}\n{"st')
    printed(folder, "one\ntw")
    news = tail.read()
    assert news.metrics == [{"step": 1}] and news.output == "one\n"
    append(folder.metrics, 'ep": 2}\n')
    printed(folder, "o\n")
    news = tail.read()
    assert news.metrics == [{"step": 2}] and news.output == "two\n"


def test_metrics_that_were_cut_are_followed_from_their_new_end(folder: RunFolder) -> None:
    append(folder.metrics, '{"step": 1}\n{"step": 2}\n')
    tail = Tail(folder, MARK)
    folder.metrics.write_text('{"step": 1}\n')
    assert tail.read().metrics == []
    append(folder.metrics, '{"step": 2, "again": true}\n')
    assert tail.read().metrics == [{"step": 2, "again": True}]


def test_a_line_that_was_cut_through_between_two_looks_is_left_out(folder: RunFolder) -> None:
    append(folder.metrics, '{"step": 1}\n{"step": 2}\n')
    tail = Tail(folder, MARK)
    folder.metrics.write_text('{"step": 1}\n{"step": 2, "longer": 1}\n{"step": 3}\n')
    assert tail.read().metrics == [{"step": 3}]


def test_lines_that_a_script_wrote_there_itself_are_left_out(folder: RunFolder) -> None:
    tail = Tail(folder, MARK)
    append(folder.metrics, '{"epoch": 0, "accuracy": 0.5}\n{"step": 3, "epoch": 0}\n')
    assert tail.read().metrics == [{"step": 3, "epoch": 0}]


def test_letters_that_are_not_utf8_do_not_stop_it(folder: RunFolder) -> None:
    tail = Tail(folder, MARK)
    with (folder.logs / "rank_0.txt").open("ab") as file:
        file.write(b"caf\xe9\n" + "é\n".encode())
    assert tail.read().output == "caf\ufffd\né\n"


def test_output_is_muted_from_the_failure_mark_on(folder: RunFolder) -> None:
    """The supervisor shows the traceback in its own report."""
    tail = Tail(folder, MARK)
    printed(folder, f"before\n{MARK}\nTraceback\n")
    folder.event("failed")
    news = tail.read()
    assert news.output == "before\n"
    assert len(news.events) == 1
    printed(folder, "more traceback\n")
    assert tail.read().output == ""
    printed(folder, "the last of it\n")
    tail.unmute()
    printed(folder, "second attempt\n")
    assert tail.read().output == "second attempt\n"
