"""A file that grows, and is cut back, as a sink's queue."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepstep.observe.sinks import follow
from keepstep.observe.sinks.follow import Lines


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def steps(lines: Lines) -> list[int]:
    return [line["step"] for line in lines.read()]


def write(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_lines_come_once_when_they_are_whole(path: Path) -> None:
    lines = Lines(path)
    assert steps(lines) == []
    write(path, '{"step": 1}\n{"step": 2}\n{"st')
    assert steps(lines) == [1, 2]
    write(path, 'ep": 3}\n')
    assert steps(lines) == [3] and steps(lines) == []
    assert lines.position == path.stat().st_size
    assert steps(Lines(path, lines.position - 12)) == [3]


def test_a_file_that_was_cut_is_read_again(path: Path) -> None:
    lines = Lines(path)
    write(path, '{"step": 1}\n{"step": 2}\n')
    assert steps(lines) == [1, 2]
    path.write_text('{"step": 1}\n')
    assert steps(lines) == [1]


def test_a_file_that_was_cut_and_grew_past_the_place_with_other_digits_is_read_again(path: Path) -> None:
    lines = Lines(path)
    write(path, '{"step": 1, "loss": 0.5}\n{"step": 2, "loss": 0.25}\n')
    assert steps(lines) == [1, 2]
    path.write_text('{"step": 1, "loss": 0.5}\n{"step": 2, "loss": 0.24999}\n{"step": 3, "loss": 0.1}\n')
    assert steps(lines) == [1, 2, 3]


def test_a_file_that_was_cut_and_grew_with_the_same_lines_goes_on(path: Path) -> None:
    lines = Lines(path)
    write(path, '{"step": 1}\n{"step": 2}\n')
    assert steps(lines) == [1, 2]
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n')
    assert steps(lines) == [3]


def test_what_is_no_object_is_left_out(path: Path) -> None:
    write(path, '{"step": 1}\n{"ste\n\0\0\n7\n{"step": 2}\n')
    assert steps(Lines(path)) == [1, 2]


def test_a_large_file_is_read_in_parts(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "_READ_BYTES", 64)
    write(path, "".join(f'{{"step": {n}, "text": "{"x" * (n % 100)}"}}\n' for n in range(300)))
    assert steps(Lines(path)) == list(range(300))
