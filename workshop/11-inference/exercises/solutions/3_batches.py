"""The clock of a batch starts with its first request, not with its last."""

from __future__ import annotations


def batches(arrivals: list[float], max_size: int, wait_s: float) -> list[list[float]]:
    made: list[list[float]] = []
    for arrival in arrivals:
        if made and len(made[-1]) < max_size and arrival < made[-1][0] + wait_s:
            made[-1].append(arrival)
        else:
            made.append([arrival])
    return made
