"""Which samples are in the final weights?

A training was killed now and then. Each attempt began with the weights of `from_step` (0: new ones) and made `steps`:
pairs of the step's number and the ids it consumed. Return the ids that the last attempt's weights have seen, in the
order of the steps, an id as often as it was seen. What stands here counts all work, also what was lost with a worker.
"""

from __future__ import annotations

from typing import NamedTuple


class Attempt(NamedTuple):
    from_step: int
    steps: list[tuple[int, list[int]]]


def in_the_weights(attempts: list[Attempt]) -> list[int]:
    return [sample for attempt in attempts for _, ids in attempt.steps for sample in ids]
