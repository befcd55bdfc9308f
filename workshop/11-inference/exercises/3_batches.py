"""Exercise 3: which requests share a batch.

Write `batches(arrivals, max_size, wait_s)`: `arrivals` are the times, in seconds and in order, at which requests come.
A batch is open from its first request on, and closed when it holds `max_size` requests, or `wait_s` after its first
one: a request that comes `wait_s` later, or after that, is in another. Return the batches, each as a list of its
arrival times. (That the model takes time to answer is left out here.)
"""

from __future__ import annotations


def batches(arrivals: list[float], max_size: int, wait_s: float) -> list[list[float]]:
    raise NotImplementedError
