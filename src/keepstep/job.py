"""What a supervisor tells the workers it starts: the job, and what to run. Free of torch, for who only passes it on."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keepstep.errors import ConfigError

JOB = "KEEPSTEP_JOB"
"""The environment variable that carries the job to workers, as one JSON value."""
TARGET = "KEEPSTEP_TARGET"
"""The environment variable that tells a worker what to run."""
SUPERVISOR = "KEEPSTEP_SUPERVISOR"
"""The environment variable with the process id of who started a worker, and must outlive it."""
LOGS = "KEEPSTEP_LOGS"
"""The environment variable with the folder of the workers' logs."""
RAY_ADDRESS = "KEEPSTEP_RAY_ADDRESS"
"""The environment variable that says where Ray is, for workers that run on it; others have Ray's own, RAY_ADDRESS."""
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""The environment variable, torchrun's own, with the file that a failing worker leaves its report in."""
PICKLED = ".function.pkl"
IMPORTS = "imports_"
"""The file's name, beside the heartbeats in which a worker notes what its script has imported; its rank follows."""


@dataclass(frozen=True)
class Job:
    """What a supervisor tells the workers it starts."""

    settings: dict[str, Any]
    """Settings given on the command line: they win over those in `keepstep.start(...)`."""
    name: str
    hearts: str
    """Folder of the heartbeats, on this machine."""
    in_process: bool
    """Whether the supervisor shares the worker's process: then signals and the display are the worker's."""
    replay_until: int = 0
    """The furthest step that an earlier attempt made."""
    launched: float = 0.0
    inspected_step: int = 0
    """The step in which an earlier attempt's loss became no number: everything is looked at there."""
    fingerprints: bool = False
    """Whether workers note a fingerprint of every step, for `keepstep verify`."""
    death: tuple[float, ...] | None = None
    """When a worker had died, was found dead, and all had gone, if this attempt is made for that reason."""

    def to_json(self) -> str:
        return json.dumps(self.__dict__)

    @classmethod
    def from_environment(cls) -> Job | None:
        text = os.environ.get(JOB)
        return cls(**json.loads(text)) if text else None


@dataclass(frozen=True)
class Target:
    """What the workers run: a script, `package.module:function`, or a pickled function."""

    what: str
    """The script's path, `package.module:function`, or the pickle's path."""
    arguments: tuple[str, ...] = ()
    function: Callable[[], Any] | None = None
    """The function itself: for a worker in this process, which needs no pickle."""

    def to_json(self) -> str:
        return json.dumps({"what": self.what, "arguments": self.arguments})

    @classmethod
    def from_json(cls, text: str) -> Target:
        raw = json.loads(text)
        return cls(raw["what"], tuple(raw["arguments"]))

    @property
    def is_pickled(self) -> bool:
        return self.what.endswith(PICKLED)

    @property
    def is_script(self) -> bool:
        return not self.is_pickled and (self.what.endswith(".py") or ":" not in self.what)

    def check(self) -> None:
        """Raises if there is no such script."""
        if not self.is_script:
            return
        path = Path(self.what)
        if not path.exists():
            near = sorted(p.name for p in path.parent.glob("*.py")) if path.parent.is_dir() else []
            found = f"; there are {', '.join(near[:5])}" if near else ""
            raise ConfigError(f"there is no script {self.what}{found}")
        if path.is_dir():
            raise ConfigError(f"{self.what} is a folder; give the script in it, as {path / 'train.py'}")


def script_name(path: str) -> str:
    """What to call a run by default: the script's name."""
    stem = Path(path).stem
    kept = "".join(c if c.isalnum() or c in "._-" else "-" for c in stem).lstrip("._-")
    return kept or "run"


def stamped(name: str, moment: float) -> str:
    return f"{name}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(moment))}"
