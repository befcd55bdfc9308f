"""What sinks get of a run, and what a run notices of sinks that fail, hang or are slow: a line at most."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from keepstep.folder import RunFolder
from keepstep.observe.sinks import About, Sinks, fan_out, feed

CONFIG = {"settings": {"workers": 2, "name": None}, "script": "train.py", "arguments": ["--lr", "0.1"]}


class Server:
    """What is left of the sinks when their process has gone; and how they behave."""

    def __init__(self) -> None:
        self.values: list[tuple[str, str, int, float]] = []
        """(series, metric, step, value)"""
        self.events: list[str] = []
        self.opened: list[About] = []
        self.closed: list[str] = []
        self.abandoned = 0
        self.in_call: Callable[[str], None] = lambda call: None
        """Called at the beginning of every call, by its name."""

    def steps(self, metric: str, series: str | None = None) -> list[int]:
        return [step for id, name, step, _ in self.values if name == metric and series in (None, id)]


class Fake:
    lasting = True

    def __init__(self, about: About, server: Server) -> None:
        self._about, self._server = about, server
        server.in_call("make")

    def open(self) -> str:
        self._server.in_call("open")
        self._server.opened.append(self._about)
        return "here"

    def reached(self, noted: dict[str, int]) -> dict[str, int]:
        self._server.in_call("reached")
        mine = [(name, step) for id, name, step, _ in self._server.values if id == self._about.id]
        return {name: max(step for other, step in mine if other == name) for name, _ in mine}

    def metrics(self, lines: list[dict[str, Any]]) -> None:
        self._server.in_call("metrics")
        for line in lines:
            values = {name: value for name, value in line.items() if name not in ("step", "epoch")}
            self._server.values += [(self._about.id, name, line["step"], value) for name, value in values.items()]
        self._server.in_call("metrics sent")

    def event(self, event: dict[str, Any]) -> None:
        self._server.in_call("event")
        self._server.events.append(event["event"])

    def close(self, status: str) -> None:
        self._server.in_call("close")
        self._server.closed.append(status)

    def abandon(self) -> None:
        self._server.abandoned += 1


class Forgetful(Fake):
    lasting = False


class Process:
    """A process that runs a training with sinks: its folder, and what was said."""

    def __init__(self, folder: RunFolder, servers: dict[str, Server]) -> None:
        self.folder, self.said, self.problems = folder, [], []  # type: ignore[var-annotated]
        self.sinks = Sinks.open(
            dict.fromkeys(servers),
            folder.path,
            CONFIG,
            self.said.append,
            lambda *problem: self.problems.append(problem),
        )

    def log(self, *steps: int, **values: float) -> None:
        with self.folder.metrics.open("a") as file:
            for step in steps:
                file.write(json.dumps({"step": step, "epoch": 0, **(values or {"loss": float(step)})}) + "\n")

    def resume(self, step: int) -> None:
        """Back to the checkpoint of that step."""
        lines = [line for line in self.folder.metrics.read_text().splitlines() if json.loads(line)["step"] <= step]
        self.folder.metrics.write_text("".join(line + "\n" for line in lines))
        self.folder.event("resumed", step=step)

    def die(self) -> None:
        """As by SIGKILL: the threads are stopped where they wait, and nothing is closed."""
        for thread in self.sinks._feeds:
            thread._feed = None  # type: ignore[method-assign,assignment]
            thread._send = _stop  # type: ignore[method-assign]
            thread._ending.set()
            thread.join(5)
            assert not thread.is_alive()


def _stop() -> None:
    raise SystemExit


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path, "run")
    folder.create()
    return folder


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "_LOOK_S", 0.01)
    monkeypatch.setattr(feed, "_RETRY_S", 0.01)
    monkeypatch.setattr(fan_out, "_LOOK_S", 0.01)


@pytest.fixture
def start(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Process]:
    """`start(one=Server())` is a process with that sink."""

    def make(**servers: Server) -> Process:
        def load(name: str) -> Callable[[About], Fake]:
            return lambda about: (Forgetful if name == "forgetful" else Fake)(about, servers[name])

        monkeypatch.setattr(fan_out, "load", load)
        return Process(folder, servers)

    return make


def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


Start = Callable[..., Process]


def test_every_sink_gets_every_line_once_and_the_end(start: Start) -> None:
    one, two = Server(), Server()
    process = start(one=one, two=two)
    process.log(1, 2, 3)
    process.folder.event("started", step=0)
    process.log(3, accuracy=0.5)
    process.sinks.close("finished")
    for server in (one, two):
        assert server.steps("loss") == [1, 2, 3] and server.steps("accuracy") == [3]
        assert server.events == ["started"] and server.closed == ["finished"]
    assert sorted(process.said) == ["keepstep: one: here", "keepstep: two: here"]
    assert process.problems == []


def test_a_sink_is_told_what_the_run_was_started_with(start: Start) -> None:
    server = Server()
    process = start(one=server)
    process.sinks.close("finished")
    (about,) = server.opened
    assert about.name == about.title == "run"
    expected = {"script": "train.py", "arguments": "--lr 0.1", "lr": "0.1", "keepstep.workers": "2"}
    assert about.parameters == expected


@pytest.mark.parametrize("call", ["make", "open", "metrics", "metrics sent", "event"])
@pytest.mark.parametrize("error", [OSError("disk full"), SystemExit(3)], ids=lambda error: type(error).__name__)
def test_a_sink_that_fails_is_said_once_and_gets_each_step_once(start: Start, call: str, error: BaseException) -> None:
    bad, good = Server(), Server()
    times = [0]

    def fail(found: str) -> None:
        if found == call and times[0] < 3:
            times[0] += 1
            raise error

    bad.in_call = fail
    process = start(bad=bad, good=good)
    process.folder.event("started", step=0)
    process.log(*range(1, 6))
    until(lambda: bad.steps("loss") == [1, 2, 3, 4, 5])
    process.log(6)
    process.sinks.close("finished")
    assert times[0] >= 2
    for server in (bad, good):
        assert server.steps("loss") == [1, 2, 3, 4, 5, 6] and server.closed == ["finished"]
    ((name, problem),) = process.problems
    assert name == "bad" and str(error) in problem and "the run goes on without it" in problem
    assert process.said.count("keepstep: bad: here") in (1, 2)


@pytest.mark.parametrize("call", ["open", "metrics", "close"])
def test_a_sink_that_never_works_is_left_with_a_count(start: Start, call: str) -> None:
    bad = Server()

    def fail(found: str) -> None:
        if found == call:
            raise ConnectionError("refused")

    bad.in_call = fail
    process = start(bad=bad)
    process.log(1, 2, 3)
    until(lambda: bool(process.problems) or call == "close")
    process.sinks.close("finished")
    texts = [problem for _, problem in process.problems]
    assert "ConnectionError: refused; the run goes on without it" in texts[0]
    lost = [] if call == "close" else ["3 line(s) of metrics were not delivered; they are in metrics.jsonl"]
    assert texts[1:] == lost


@pytest.mark.parametrize("call", ["make", "open", "metrics", "event", "close"])
def test_a_sink_that_hangs_holds_up_nothing(start: Start, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    monkeypatch.setattr(fan_out, "_SILENCE_S", 0.4)  # of which the good one must never need so much
    monkeypatch.setattr(fan_out, "_CLOSE_S", 1.5)
    bad, good, wake = Server(), Server(), threading.Event()
    bad.in_call = lambda found: wake.wait(30) and None if found == call else None
    began = time.monotonic()
    process = start(bad=bad, good=good)
    process.folder.event("started", step=0)
    process.log(1, 2)
    if call != "close":
        until(lambda: bool(process.problems))
        assert "no answer for 0 s; the run goes on without it" in process.problems[0][1]
    process.sinks.close("finished")
    assert time.monotonic() - began < 10
    assert {name for name, _ in process.problems} == {"bad"}
    assert good.steps("loss") == [1, 2] and good.closed == ["finished"]
    wake.set()


def test_a_slow_sink_gets_everything_and_nobody_waits_for_it(start: Start) -> None:
    slow = Server()
    slow.in_call = lambda call: time.sleep(0.05) if call == "metrics" else None
    process = start(slow=slow)
    until(lambda: bool(slow.opened))
    began = time.monotonic()
    for step in range(1, 2001):
        process.log(step)
    assert time.monotonic() - began < 3
    process.sinks.close("finished")
    assert slow.steps("loss") == list(range(1, 2001)) and process.problems == []


def test_steps_that_are_made_again_are_not_sent_again(start: Start) -> None:
    server = Server()
    process = start(one=server)
    process.log(1, 2, 3, 4)
    until(lambda: server.steps("loss") == [1, 2, 3, 4])
    process.resume(2)
    process.log(3, 4, 5)
    process.sinks.close("finished")
    assert server.steps("loss") == [1, 2, 3, 4, 5]


def test_another_process_goes_on_with_the_same_series(start: Start) -> None:
    first, second = Server(), Server()
    process = start(one=first)
    process.log(1, 2, 3, 4)
    process.folder.event("stopped", step=4)
    process.sinks.close("stopped")
    process = start(one=second)
    process.resume(3)
    process.log(4, 5)
    process.sinks.close("finished")
    assert second.opened[0].id == first.opened[0].id and second.opened[0].series == 1
    assert second.steps("loss") == [5]
    assert (first.events, second.events) == (["stopped"], ["resumed"])
    assert (first.closed, second.closed) == (["stopped"], ["finished"])


def test_a_killed_process_may_have_sent_more_or_less_than_it_noted(start: Start, folder: RunFolder) -> None:
    server = Server()
    process = start(one=server)
    process.log(1, 2, 3, 4)
    until(lambda: server.steps("loss") == [1, 2, 3, 4])
    process.die()
    noted = json.loads((folder.path / "sinks.json").read_text())
    assert noted["one"]["is_open"] and noted["one"]["reached"] == {"loss": 4}

    noted["one"]["reached"] = {"loss": 2}  # killed before it could note 3 and 4
    (folder.path / "sinks.json").write_text(json.dumps(noted))
    process = start(one=server)
    process.resume(3)
    process.log(4, 5)
    until(lambda: 5 in server.steps("loss"))
    process.die()
    assert server.steps("loss") == [1, 2, 3, 4, 5]

    del server.values[-2:]  # it never took 4 and 5, though they were handed to it
    process = start(one=server)
    process.sinks.close("finished")
    assert server.steps("loss") == [1, 2, 3, 4, 5]
    assert len({about.id for about in server.opened}) == 1


def test_the_id_is_noted_before_a_run_is_made_of_it(start: Start, folder: RunFolder) -> None:
    server = Server()
    noted: list[str] = []
    server.in_call = lambda call: noted.append((folder.path / "sinks.json").read_text()) if call == "open" else None
    process = start(one=server)
    process.sinks.close("finished")
    assert json.loads(noted[0])["one"]["id"] == server.opened[0].id


def test_a_run_that_lost_all_checkpoints_begins_a_second_series(start: Start) -> None:
    server = Server()
    process = start(one=server)
    process.log(1, 2, 3)
    until(lambda: server.steps("loss") == [1, 2, 3])
    process.folder.event("no_checkpoint_left")
    process.resume(0)
    process.log(1, 2)
    process.sinks.close("finished")
    old, new = server.opened
    assert (old.title, new.title) == ("run", "run (2)") and old.id != new.id
    assert server.steps("loss", old.id) == [1, 2, 3] and server.steps("loss", new.id) == [1, 2]
    assert server.closed == ["failed", "finished"]
    assert process.said == ["keepstep: one: here", "keepstep: one: here (series 2: the run began again)"]
    again = Server()
    process = start(one=again)
    process.log(3)
    process.sinks.close("finished")
    assert again.opened[0].id == new.id and again.steps("loss") == [3]


def test_a_sink_that_forgets_gets_everything_again(start: Start) -> None:
    first, second = Server(), Server()
    process = start(forgetful=first)
    process.log(1, 2)
    process.folder.event("no_checkpoint_left")
    process.folder.event("failed")
    process.sinks.close("stopped")
    process = start(forgetful=second)
    process.log(3)
    process.sinks.close("finished")
    assert second.steps("loss") == [1, 2, 3] and "failed" in second.events


def test_a_sink_that_is_added_later_gets_what_was_before(start: Start) -> None:
    first, second = Server(), Server()
    process = start(one=first)
    process.log(1, 2)
    process.sinks.close("stopped")
    process = start(one=first, two=second)
    process.log(3)
    process.sinks.close("finished")
    assert first.steps("loss") == second.steps("loss") == [1, 2, 3]


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"one": {"id": 3}}', '{"one": {"ids": "a"}}', '{"one": {"id": "../x"}}']
)
def test_a_sinks_file_that_is_not_ours_is_said_and_replaced(start: Start, folder: RunFolder, content: str) -> None:
    (folder.path / "sinks.json").write_text(content)
    server = Server()
    process = start(one=server)
    process.log(1)
    process.sinks.close("finished")
    assert server.steps("loss") == [1]
    ((_, problem),) = process.problems
    assert "sinks.json cannot be used" in problem
    assert json.loads((folder.path / "sinks.json").read_text())["one"]["reached"] == {"loss": 1}


def test_numbers_go_in_requests_of_a_bounded_size(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "_SEND_AT_ONCE", 30)
    server, sizes = Server(), [0]
    server.in_call = lambda call: sizes.append(len(server.values)) if call == "metrics sent" else None
    process = start(one=server)
    process.log(*range(1, 101))
    process.sinks.close("finished")
    assert server.steps("loss") == list(range(1, 101))
    assert max(b - a for a, b in itertools.pairwise(sizes)) <= 10


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--lr", "1e-3", "--wide"], {"lr": "1e-3", "wide": "true"}),
        (["--lr=1e-3", "--fast", "--depth", "-2"], {"lr": "1e-3", "fast": "true", "depth": "-2"}),
        (["config.yaml", "-v", "--", "x"], {}),
    ],
)
def test_the_scripts_arguments_are_parameters_by_their_names(words: list[str], expected: dict[str, str]) -> None:
    found = fan_out.parameters({"settings": {}, "script": "t.py", "arguments": words})
    assert found == {"script": "t.py", "arguments": " ".join(words), **expected}
