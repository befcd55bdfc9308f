"""The sinks of a run folder: those that the run's own settings name, wherever they were given."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable

from keepstep.config import ObserveConfig
from keepstep.errors import KeepstepError
from keepstep.folder import RunFolder
from keepstep.observe.sinks.fan_out import Sinks
from keepstep.observe.sinks.registry import load


class RunSinks:
    """Says and writes down what goes wrong with a sink; nothing of it reaches the training."""

    def __init__(
        self, folder: RunFolder, say: Callable[[str], None], writes_events: bool = True, trains_here: bool = False
    ) -> None:
        """`writes_events`: whether a line may be added to events.jsonl at any time; else at the end."""
        self._folder, self._say = folder, say
        self._writes_events, self._trains_here = writes_events, trains_here
        self._sinks: Sinks | None = None
        self._unwritten: list[tuple[str, str]] = []

    def open(self) -> None:
        """Called when the run has started or gone on: config.json is there. Opened once, through all attempts."""
        if self._sinks is not None:
            return
        try:
            config = self._folder.read_config()
            names = ObserveConfig(config["settings"].get("sinks")).destinations()
            if self._trains_here:
                self._import(names)
            if names:
                self._sinks = Sinks.open(names, self._folder.path, config, self._say, self._on_problem)
        except Exception as error:  # of a file that is not as it should be, or of ours: no reason to stop a training
            self._on_problem("sinks", f"{type(error).__name__}: {error}; the run goes on without them")

    def _import(self, names: Iterable[str]) -> None:
        """Before the training, rather than beside it: a DataLoader that forks while a thread imports gets half a
        module, and a lock on it that nobody opens."""
        for name in names:
            with contextlib.suppress(Exception):  # comes again in the sink's thread, and is said there
                load(name)

    def close(self, status: str) -> None:
        if self._sinks is not None:
            self._sinks.close(status)
        self._writes_events = True
        for name, problem in self._unwritten:
            self._write(name, problem)
        self._unwritten = []

    def _on_problem(self, name: str, problem: str) -> None:
        self._say(f"keepstep: {name}: {problem}")
        if self._writes_events:
            self._write(name, problem)
        else:
            self._unwritten.append((name, problem))

    def _write(self, name: str, problem: str) -> None:
        with contextlib.suppress(KeepstepError):
            self._folder.event("sink_problem", sink=name, problem=problem)
