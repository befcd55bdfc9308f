"""sinks.json: which series in each sink is this run's, and how far it got. What makes one run of many attempts."""

from __future__ import annotations

import json
import threading
import uuid
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from keepstep.checkpoint.store import write_durably


@dataclass
class Entry:
    """One sink's part."""

    id: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    series: int = 1
    where: str = ""
    """Where a person can look at it."""
    reached: dict[str, int] = field(default_factory=dict)
    """Metric → the newest step that was sent."""
    events: int = 0
    """Bytes of events.jsonl that were sent."""
    is_open: bool = False
    """Still so when it is read: a process died in between, and the sink may have more, or less, than is noted."""

    def news_in(self, line: dict[str, Any]) -> dict[str, Any] | None:
        """The line without what was sent before; None if nothing is left of it."""
        step = line.get("step")
        if type(step) is not int:
            return None
        fresh = {name: value for name, value in line.items() if step > self.reached.get(name, -1)}
        return fresh if fresh.keys() - {"step", "epoch"} else None

    def note(self, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            self.reached.update({name: line["step"] for name in line if name not in ("step", "epoch")})

    def begin_anew(self) -> None:
        """Another series: the run itself has begun again at step 0."""
        self.id, self.series, self.reached, self.is_open = Entry().id, self.series + 1, {}, False


class SinksFile:
    """The file, of which each sink's thread writes its part."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "sinks.json"
        self._lock = threading.Lock()
        self.problem: str | None = None
        """Why the file that is there could not be used."""
        self._saved = self._read()

    def _read(self) -> dict[str, dict[str, Any]]:
        try:
            found = json.loads(self._path.read_text())
            return {name: asdict(_checked(entry)) for name, entry in found.items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
            self.problem = f"{self._path} cannot be used ({error}): a new run is begun"
            return {}

    def entry(self, name: str) -> Entry:
        """The sink's part, for its thread alone."""
        found = self._saved.get(name)
        return _checked(found) if found else Entry()

    def save(self, name: str, entry: Entry) -> None:
        part = asdict(entry)
        with self._lock:
            self._saved[name] = part
            write_durably(self._path, json.dumps(self._saved, indent=1))


def _checked(raw: dict[str, Any]) -> Entry:
    entry = Entry(**raw)
    if any(type(value) is not type(default) for value, default in zip(asdict(entry).values(), _TYPES, strict=True)):
        raise ValueError("it has values of other types than keepstep writes")
    if not all(type(step) is int for step in entry.reached.values()) or not entry.id.isalnum():
        raise ValueError("it has values that keepstep does not write")
    return entry


_TYPES = list(asdict(Entry()).values())
