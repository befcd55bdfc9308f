"""What failed, what is left of the budget, retry or stop: pure decisions, tested without processes."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

_CONSEQUENCE = re.compile(
    r"Connection (closed by peer|reset by peer|refused)|Broken pipe|Socket closed|recvBytes|sendBytes|"
    r"NCCL.*(remote|unhandled system) error|ncclRemoteError|ncclSystemError|DistNetworkError|DistStoreError|"
    r"Application timeout caused pair closure|Timed out waiting|watchdog|Read error \[|Write error \[",
    re.IGNORECASE | re.DOTALL,
)
"""What a worker says when another one has gone: the other one is the cause."""

LOST_NODE = "lost with its node"
"""A cause: machines come and go, and it is nobody's failure."""
LOST_HOST = "lost with its Ray worker"
NOT_FINITE = "NotFinite"
"""A cause: the loss is no number any more. Tried once more, to find out which tensor was the first."""
HANG = "hang"

_CRASHES = {"SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL"}
"""Signals that a program brings on itself: they come again. Others come from outside."""


@dataclass(frozen=True)
class WorkerFailure:
    """How one worker ended that should not have."""

    rank: int
    cause: str
    """`ValueError`, `SIGKILL`, `exit code 3`, `lost with its node`."""
    message: str = ""
    traceback: str = ""
    step: int = 0
    phase: str = ""
    moment: float = 0.0
    log_tail: str = ""
    user_error: bool = False
    """A keepstep error that says what to do: trying again cannot help."""

    @property
    def is_exception(self) -> bool:
        return not self.cause.startswith(("SIG", "exit code", "lost"))

    @property
    def is_consequence(self) -> bool:
        return self.is_exception and not self.user_error and bool(_CONSEQUENCE.search(f"{self.cause}: {self.message}"))

    @property
    def signature(self) -> tuple[str, str, int]:
        """The same twice: it will come a third time."""
        return self.cause, re.sub(r"0x[0-9a-f]+|\d+", "#", self.message), self.step

    @property
    def headline(self) -> str:
        text = f": {self.message}" if self.message else ""
        where = f", {self.phase} phase" if self.phase else ""
        return f"rank {self.rank} at step {self.step}{where}: {self.cause}{text}"


_MISMATCH = re.compile(r"collective mismatch|preamble\.length|Detected mismatch between collectives", re.IGNORECASE)
"""What gloo and torch say when workers meet in different calls, where they do not just wait for each other."""


def made_different_calls(failures: list[WorkerFailure]) -> bool:
    return any(_MISMATCH.search(f"{failure.message}\n{failure.log_tail}") for failure in failures)


@dataclass(frozen=True)
class Decision:
    """Whether to try again, and why."""

    retry: bool
    reason: str


def first_cause_first(failures: list[WorkerFailure]) -> list[WorkerFailure]:
    """Orders one attempt's failures: causes before consequences, then by time."""
    return sorted(failures, key=lambda failure: (failure.is_consequence, failure.moment, failure.rank))


def decide(history: list[list[WorkerFailure]], max_failures: int) -> Decision:
    """Whether another attempt makes sense. `history`: the failures of each attempt, first cause first."""
    cause = history[-1][0]
    if cause.user_error:
        return Decision(False, "this needs a change, not another try")
    if cause.cause == NOT_FINITE:
        is_explained = any(failures[0].cause == NOT_FINITE for failures in history[:-1])
        reason = "it would come again" if is_explained else "making that step again, to see where it begins"
        return Decision(not is_explained, reason)
    if len(history) == 1 and cause.is_exception and not cause.is_consequence and cause.phase == "start":
        return Decision(False, "the script failed before its first step: it would fail again")
    repeats = len(history) > 1 and history[-2][0].signature == cause.signature
    if repeats and (cause.is_exception or cause.cause in _CRASHES):
        return Decision(False, f"the same error at the same step ({cause.step}) twice: not retrying")
    if cause.cause == LOST_NODE:
        return Decision(True, "a node is gone")
    counted = sum(failures[0].cause not in (LOST_NODE, NOT_FINITE) for failures in history)
    if counted > max_failures:
        return Decision(False, f"failure {counted}, and --max-failures is {max_failures}")
    return Decision(True, f"failure {counted} of {max_failures} forgiven")


def exit_cause(exit_code: int) -> str:
    """`SIGKILL` for -9, `exit code 3` for 3."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return signal.Signals(-exit_code).name
    except ValueError:
        return f"SIG{-exit_code}"


def describe(failures: list[WorkerFailure]) -> str:
    """The report of one attempt: every failed rank, the first cause first, with traceback and log."""
    cause = failures[0]
    if cause.user_error:
        return cause.message
    if cause.cause == NOT_FINITE:
        return cause.message
    lines = [cause.headline]
    if cause.traceback:
        lines += [_indent(cause.traceback)]
    elif cause.log_tail:
        lines += ["  the end of its log:", _indent(cause.log_tail)]
    lines += [f"  then {_short(failure)}" for failure in failures[1:]]
    return "\n".join(lines)


def _short(failure: WorkerFailure) -> str:
    if failure.is_consequence:
        return f"rank {failure.rank} at step {failure.step}: lost touch with the others ({failure.cause})"
    return failure.headline


def _indent(text: str) -> str:
    return "\n".join("  | " + line for line in text.rstrip().splitlines())
