"""What a worker's process leaves behind when it fails: its exit code, its report, the end of its log."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from keepstep.failure import WorkerFailure, exit_cause

_LOG_TAIL_LINES = 20
_LOG_TAIL_BYTES = 16384


def log_size(log: Path) -> int:
    """How long a log is before an attempt, which appends to it."""
    return log.stat().st_size if log.exists() else 0


def failure_of(rank: int, exit_code: int, error_file: str, log: Path, log_start: int) -> WorkerFailure:
    """Puts it together; `log_start` is where this attempt's part of the log begins."""
    report, tail = _read_report(error_file), _tail(log, log_start)
    if report is None:
        return WorkerFailure(rank, exit_cause(exit_code), moment=time.time(), log_tail=tail)
    return WorkerFailure(
        rank=rank,
        cause=report["cause"],
        message=report["message"],
        traceback=report["traceback"],
        step=report["step"],
        moment=report["time"],
        log_tail=tail,
        user_error=report["user_error"],
    )


def without_torn_down(failures: list[WorkerFailure]) -> list[WorkerFailure]:
    """Drops workers that were ended because another had failed."""
    own = [failure for failure in failures if failure.cause != "SIGTERM"]
    return own or failures


def _read_report(path: str) -> dict[str, Any] | None:
    try:
        report: dict[str, Any] = json.loads(Path(path).read_text())["message"]["extraInfo"]["keepstep"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return report


def _tail(log: Path, start: int) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(start, log.stat().st_size - _LOG_TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join(lines[-_LOG_TAIL_LINES:])
