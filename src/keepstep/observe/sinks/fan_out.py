"""All sinks of a run: opened when it starts, told when it ends; nothing that one does can hold up the training."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from keepstep.observe.sinks.base import About, Sink
from keepstep.observe.sinks.feed import Feed, Source
from keepstep.observe.sinks.record import SinksFile
from keepstep.observe.sinks.registry import load

_SILENCE_S = 60.0
"""A call that takes longer is said."""
_CLOSE_S = 15.0
"""How long the end of a run waits for sinks that are not through."""
_LOOK_S = 1.0

Say = Callable[[str], None]
OnProblem = Callable[[str, str], None]


class Sinks:
    """A thread a sink, each of which follows the run folder's metrics and events by itself."""

    def __init__(self, feeds: list[Feed]) -> None:
        self._feeds = feeds
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="keepstep-sinks", daemon=True).start()

    @classmethod
    def open(
        cls, names: dict[str, int | None], folder: Path, config: dict[str, Any], say: Say, on_problem: OnProblem
    ) -> Sinks:
        """Starts to feed `names` (and what stood behind each) from the run folder. `config`: what config.json holds."""
        record = SinksFile(folder)
        source = Source(folder.name, folder, parameters(config), record, say, on_problem)
        feeds = []
        for name, option in names.items():
            if record.problem:
                on_problem(name, record.problem)
            feeds.append(Feed(name, partial(_make, name), option, source))
        for feed in feeds:
            feed.start()
        return cls(feeds)

    def close(self, status: str) -> None:
        """Sends what is left, and how the run ended: finished, stopped or failed. Who is not through soon is left."""
        if self._closed.is_set():
            return
        self._closed.set()
        for feed in self._feeds:
            feed.end(status)
        deadline = time.monotonic() + _CLOSE_S
        for feed in self._feeds:
            is_silent = feed.busy_s > _SILENCE_S  # who has waited so long in vain need not wait again
            feed.join(0.0 if is_silent else max(0.0, deadline - time.monotonic()))
            if feed.is_alive():
                feed.fail(f"it was not through {_CLOSE_S:.0f} s after the run; the run ends without it")
            missing = 0 if feed.is_through else feed.undelivered()
            if missing:
                feed.tell(f"{missing} line(s) of metrics were not delivered; they are in metrics.jsonl")

    def _watch(self) -> None:
        while not self._closed.wait(_LOOK_S):
            for feed in self._feeds:
                if feed.busy_s > _SILENCE_S:
                    feed.fail(f"no answer for {_SILENCE_S:.0f} s; the run goes on without it, and waits for it aside")


def _make(name: str, about: About) -> Sink:
    return load(name)(about)


def parameters(config: dict[str, Any]) -> dict[str, str]:
    """What the run was started with, by name: the script's own arguments, and keepstep's settings."""
    settings = {f"keepstep.{name}": str(value) for name, value in config["settings"].items() if value is not None}
    words = [str(word) for word in config["arguments"]]
    found = {"script": str(config["script"]), "arguments": " ".join(words), **settings}
    for place, word in enumerate(words):
        name, has_value, value = word.lstrip("-").partition("=")
        if not word.startswith("--") or not name:
            continue
        following = words[place + 1 : place + 2]
        if not has_value:
            value = following[0] if following and not following[0].startswith("--") else "true"
        found[name] = value
    return found
