"""One sink's thread: reads what the run wrote, sends what the sink does not have yet, and notes how far it got."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keepstep.observe.sinks.base import About, Sink
from keepstep.observe.sinks.follow import Lines
from keepstep.observe.sinks.record import Entry, SinksFile

_LOOK_S = 0.5
_SEND_AT_ONCE = 500
"""Numbers in one call of a sink: few enough for one request."""
_RETRY_S, _RETRY_LONGEST_S = 5.0, 60.0
_LONGEST = 600
"""Letters of an error: MLflow says what to do at the end."""
_LAST_TRIES, _LAST_WAIT_S = 3, 0.5
"""How often it is tried, and waited in between, when the run has ended."""


@dataclass(frozen=True)
class Source:
    """What all sinks of a run read, and whom they tell."""

    name: str
    folder: Path
    parameters: dict[str, str]
    record: SinksFile
    say: Callable[[str], None]
    on_problem: Callable[[str, str], None]
    """Called with the sink's name and what is wrong."""


class Feed(threading.Thread):
    """Feeds one sink until it is told to end. An error of the sink is said once, and the sink opened again later."""

    def __init__(self, sink_name: str, make: Callable[[About], Sink], option: int | None, source: Source) -> None:
        super().__init__(name=f"keepstep-{sink_name}", daemon=True)
        self.sink_name, self._make, self._option, self._source = sink_name, make, option, source
        self._entry = source.record.entry(sink_name)
        self._metrics = Lines(source.folder / "metrics.jsonl")
        self._events = Lines(source.folder / "events.jsonl", self._entry.events)
        self._ending = threading.Event()
        self._status = ""
        self._busy_since: float | None = None
        self._has_failed = False
        self._announces = True
        self.is_through = False
        """Whether everything was sent, and the sink closed."""
        self._lasts = True
        self._sink: Sink | None = None

    # -- what others ask ----------------------------------------------------------------------------------------------

    @property
    def busy_s(self) -> float:
        """How long the sink has been at the call it is in."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def end(self, status: str) -> None:
        """Sends what is left, closes the sink, and ends: soon, not now."""
        self._status = status
        self._ending.set()

    def undelivered(self) -> int:
        """Lines of metrics that the sink does not have."""
        lines = Lines(self._source.folder / "metrics.jsonl")
        entry = Entry(reached=dict(self._entry.reached))
        return sum(entry.news_in(line) is not None for line in lines.read())

    def tell(self, problem: str) -> None:
        self._source.on_problem(self.sink_name, problem)

    def fail(self, problem: str) -> None:
        """Says what is wrong, once: a server that comes and goes must not fill the screen."""
        if not self._has_failed:
            self._has_failed = self._announces = True
            self.tell(problem)

    # -- the thread ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        wait_s, tries_left = _RETRY_S, _LAST_TRIES
        while tries_left:
            tries_left -= self._ending.is_set()
            try:
                self._feed()
                self.is_through = True
                return
            except _BeginAnew:
                continue
            except BaseException as error:  # libraries raise SystemExit, too
                self.fail(f"{_one_line(error)}; the run goes on without it, and it is tried again now and then")
            self._discard()
            if self._ending.wait(wait_s):
                time.sleep(_LAST_WAIT_S)
            wait_s = min(2 * wait_s, _RETRY_LONGEST_S)

    def _feed(self) -> None:
        self._open()
        while True:
            is_ending = self._ending.is_set()  # looked at first: what was written before it is then read below
            self._send()
            if is_ending:
                break
            self._ending.wait(_LOOK_S)
        self._close(self._status)

    def _open(self) -> None:
        entry = self._entry
        about = About(
            name=self._source.name,
            folder=self._source.folder,
            id=entry.id,
            parameters=self._source.parameters,
            option=self._option,
            series=entry.series,
        )
        if not entry.where:
            self._save()  # the id: a crash between here and the next line must not make two runs
        with self._busy():
            sink = self._sink = self._make(about)
            where, self._lasts = sink.open(), sink.lasting
            if not self._lasts:
                entry.reached, entry.events = {}, 0
            elif entry.is_open:
                entry.reached = dict(sink.reached(entry.reached))
        if self._announces:
            self._announces = False
            again = f" (series {entry.series}: the run began again)" if entry.series > 1 else ""
            self._source.say(f"keepstep: {self.sink_name}: {where}{again}")
        entry.where, entry.is_open = where, True
        self._save()
        self._metrics.restart()
        self._events = Lines(self._source.folder / "events.jsonl", entry.events)

    def _send(self) -> None:
        assert self._sink is not None
        for event in self._events.read():
            if event.get("event") == "no_checkpoint_left" and self._entry.reached:
                self._begin_anew()
            with self._busy():
                self._sink.event(event)
            self._entry.events = self._events.position
        for lines in self._batches():
            with self._busy():
                self._sink.metrics(lines)
            self._entry.note(lines)
            self._save()

    def _batches(self) -> Iterator[list[dict[str, Any]]]:
        """New lines, so many at once that a sink can take them in one request."""
        batch: list[dict[str, Any]] = []
        numbers = 0
        for line in self._metrics.read():
            fresh = self._entry.news_in(line)
            if fresh is not None:
                batch.append(fresh)
                numbers += len(fresh)
            if numbers >= _SEND_AT_ONCE:
                yield batch
                batch, numbers = [], 0
        if batch:
            yield batch

    def _begin_anew(self) -> None:
        """All checkpoints were lost, and the run is at step 0: the old series ends where it is, a second one begins."""
        if not self._lasts:
            self._entry.reached.clear()
            self._metrics.restart()
            return
        self._entry.events = self._events.position
        self._close("failed")
        self._entry.begin_anew()
        self._announces = True
        self._save()
        raise _BeginAnew

    def _close(self, status: str) -> None:
        assert self._sink is not None
        with self._busy():
            self._sink.close(status)
        self._sink = None
        self._entry.is_open = False
        self._save()

    def _discard(self) -> None:
        """Lets go of a sink that has failed."""
        sink, self._sink = self._sink, None
        if sink is not None:
            with contextlib.suppress(BaseException), self._busy():
                sink.abandon()

    def _save(self) -> None:
        if self._lasts:
            self._source.record.save(self.sink_name, self._entry)

    @contextmanager
    def _busy(self) -> Iterator[None]:
        self._busy_since = time.monotonic()
        try:
            yield
        finally:
            self._busy_since = None


class _BeginAnew(Exception):
    """The sink was closed, to be opened with another series."""


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:_LONGEST]}" if text else type(error).__name__
