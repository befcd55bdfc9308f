"""Starts a training, kills its workers at random moments with SIGKILL, and times how it recovers."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from common.consumed import Attempt, attempts

_POLL_S = 0.02
_LONGEST_DELAY_S = 0.3
"""After the step that a kill waits for: so that it falls into any part of a step, or between two."""


@dataclass(frozen=True)
class Kill:
    """Of the worker with this rank, some time after this step."""

    step: int
    rank: int
    delay_s: float


@dataclass(frozen=True)
class Killed:
    step: int
    """The last that was made before it."""
    rank: int
    time: float
    recovery_s: float | None
    """Until the next step was made; None: there was none."""

    def __str__(self) -> str:
        again = (
            f"{self.recovery_s:.1f} s later the next step was made" if self.recovery_s else "no step was made after it"
        )
        return f"killed worker {self.rank} after step {self.step}: {again}"


class TrainingFailed(Exception):
    """It ended with an error, or not at all; the text has the end of its output."""


def draw(num_kills: int, num_steps: int, num_workers: int, seed: int) -> list[Kill]:
    """Different steps before the last one, and a worker each."""
    if num_kills > num_steps - 2:
        raise ValueError(f"{num_kills} kills need {num_kills + 2} steps at least, this training has {num_steps}")
    chance = random.Random(seed)
    steps = sorted(chance.sample(range(1, num_steps - 1), num_kills))
    return [Kill(step, chance.randrange(num_workers), chance.uniform(0, _LONGEST_DELAY_S)) for step in steps]


def train(
    command: Sequence[str], output: Path, kills: Sequence[Kill] = (), timeout_s: float = 400, dies: bool = False
) -> list[Killed]:
    """Runs `command`, which notes what it consumes in `output`, to its end; its own output goes to OUTPUT.log.

    `dies`: the last kill is expected to end it, for it forgives none.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    log = output.with_name(f"{output.name}.log")
    done: list[tuple[Kill, int, float]] = []
    deadline = time.monotonic() + timeout_s
    with log.open("w") as file:
        plain = os.environ | {"FORCE_COLOR": ""}  # Jupyter sets it, and a file wants no progress bars
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True, env=plain)
        try:
            while process.poll() is None and time.monotonic() < deadline:
                if len(done) < len(kills):
                    killed = _kill_if_due(output, kills[len(done)], after=done[-1][2] if done else 0.0)
                    done += [killed] if killed else []
                time.sleep(_POLL_S)
        finally:
            ended = process.poll()
            if ended is None:
                _end(process)
    if ended is None or (ended != 0) != (dies and len(done) == len(kills)):
        said = f"ended with exit code {ended}" if ended is not None else f"has not ended after {timeout_s:.0f} s"
        raise TrainingFailed(f"the training {said}; the end of {log}:\n{log.read_text()[-3000:]}")
    if len(done) < len(kills):
        raise TrainingFailed(f"the training was over after {len(done)} of {len(kills)} kills: give it more epochs")
    return recovered([Killed(step, kill.rank, at, None) for kill, step, at in done], output)


def recovered(killed: list[Killed], output: Path) -> list[Killed]:
    """The same, with the time that each took to recover from, as far as it has."""
    made = attempts(output)
    return [replace(kill, recovery_s=_recovery_s(made, kill.time)) for kill in killed]


def _kill_if_due(output: Path, kill: Kill, after: float) -> tuple[Kill, int, float] | None:
    newest = _newest(output)
    if newest is None or newest.began < after or kill.rank not in newest.pids or _last_step(newest) < kill.step:
        return None
    time.sleep(kill.delay_s)
    now = time.time()
    os.kill(newest.pids[kill.rank], signal.SIGKILL)
    return kill, _last_step(_newest(output) or newest), now


def _newest(output: Path) -> Attempt | None:
    made = attempts(output)
    return made[-1] if made else None


def _last_step(attempt: Attempt) -> int:
    return max((step.step for step in attempt.steps), default=0)


def _recovery_s(made: list[Attempt], killed_at: float) -> float | None:
    times = [step.time for attempt in made if attempt.began > killed_at for step in attempt.steps]
    return min(times) - killed_at if times else None


def _end(process: subprocess.Popen[bytes]) -> None:
    """First as Ctrl-C would, so that it ends its workers itself."""
    os.killpg(process.pid, signal.SIGINT)
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
