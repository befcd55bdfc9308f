"""Which samples are in the final weights?"""

from __future__ import annotations

from typing import NamedTuple


class Attempt(NamedTuple):
    from_step: int
    steps: list[tuple[int, list[int]]]


def in_the_weights(attempts: list[Attempt]) -> list[int]:
    kept: list[tuple[int, list[int]]] = []
    for attempt in attempts:
        kept = [made for made in kept if made[0] <= attempt.from_step] + attempt.steps
    return [sample for _, ids in kept for sample in ids]
