"""From rung to rung, those that are left train the epochs between."""

from __future__ import annotations


def num_epochs(trials: int, epochs: int, keep: int) -> int:
    total, trained, rung = 0, 0, 1
    while trained < epochs:
        until = min(rung, epochs)
        total += trials * (until - trained)
        trained, rung, trials = until, rung * keep, max(1, trials // keep)
    return total
