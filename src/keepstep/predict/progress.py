"""How far a prediction is: one line that is rewritten on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time

_PLAIN_INTERVAL_S = 10.0
_LIVE_INTERVAL_S = 0.2


class Progress:
    """Counts rows. What was done by earlier starts counts as done, not as fast."""

    def __init__(self, done: int, total: int) -> None:
        self.before, self.done, self.total = done, done, total
        self._is_live = sys.stderr.isatty()
        self._interval_s = _LIVE_INTERVAL_S if self._is_live else _PLAIN_INTERVAL_S
        self._began = self._shown = time.monotonic()

    def begin(self, moment: float | None = None) -> None:
        """What came before, as loading the model, is not counted. `moment`: when it was; None: now."""
        self._began = time.monotonic() if moment is None else moment

    def add(self, rows: int) -> None:
        self.done += rows
        now = time.monotonic()
        if now - self._shown >= self._interval_s:
            self._shown = now
            end = "\x1b[K\r" if self._is_live else "\n"
            print(self.line(), end=end, file=sys.stderr, flush=True)

    def line(self) -> str:
        rate = self.rate
        left = f", {_duration((self.total - self.done) / rate)} left" if rate else ""
        return f"{self.done:,} of {self.total:,} rows, {rate:,.0f} rows/s{left}"

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    @property
    def rate(self) -> float:
        return (self.done - self.before) / max(self.seconds, 1e-9)

    def clear(self) -> None:
        """Leaves the terminal's line to what is printed next."""
        if self._is_live:
            print("\x1b[K", end="", file=sys.stderr, flush=True)


def _duration(seconds: float) -> str:
    minutes = int(seconds / 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes} min" if minutes >= 2 else f"{seconds:.0f} s"
