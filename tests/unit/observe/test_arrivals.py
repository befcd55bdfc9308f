"""Who is late where workers meet, from the times of their calls."""

from __future__ import annotations

import math

import pytest

from keepstep.observe.arrivals import NUM_FLOATS, lateness

CALLS = NUM_FLOATS - 1


def row(late: float, every: float = 0.1, what: float = 7.0) -> list[float]:
    return [what, *(1e9 + every * number + late for number in range(CALLS))]


def test_who_comes_late_each_time_makes_the_others_wait_for_that_share_of_the_time() -> None:
    first, second, third = lateness([row(0.0), row(0.04), row(0.0)])
    assert (first, third) == (0.0, 0.0)
    assert second == pytest.approx(0.4, abs=1e-3)


def test_of_two_the_later_one_is_late() -> None:
    early, late = lateness([row(0.0), row(0.05)])
    assert early == 0.0 and late == pytest.approx(0.5, abs=1e-3)


@pytest.mark.parametrize("other", [row(0.05, what=8.0), [math.nan] * NUM_FLOATS])
def test_calls_that_are_not_the_same_cannot_be_compared(other: list[float]) -> None:
    assert all(map(math.isnan, lateness([row(0.0), other])))


def test_one_worker_waits_for_nobody() -> None:
    assert all(map(math.isnan, lateness([row(0.0)])))
