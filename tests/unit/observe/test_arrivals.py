"""Who is late where workers meet, from the times of their calls."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest

from keepstep.observe import arrivals
from keepstep.observe.arrivals import NUM_FLOATS, Arrivals, lateness, median_of_others, number_runs

CALLS = NUM_FLOATS - 2
APART = list(range(CALLS))
"""Each call is waited for."""


def row(late: float, every: float = 0.1, what: float = 7.0) -> list[float]:
    return [what, CALLS, *(1e9 + every * number + late for number in range(CALLS))]


def test_who_comes_late_each_time_makes_the_others_wait_for_that_share_of_the_time() -> None:
    first, second, third = lateness([row(0.0), row(0.04), row(0.0)], APART)
    assert (first, third) == (0.0, 0.0)
    assert second == pytest.approx(0.4, abs=1e-3)


def test_of_two_the_later_one_is_late() -> None:
    early, late = lateness([row(0.0), row(0.05)], APART)
    assert early == 0.0 and late == pytest.approx(0.5, abs=1e-3)


def test_who_is_late_for_all_gradients_of_a_backward_is_waited_for_once() -> None:
    runs = [number // 4 for number in range(CALLS)]
    _, late = lateness([row(0.0), row(0.05)], runs)
    assert late == pytest.approx(0.5 / 4, abs=1e-2)


@pytest.mark.parametrize("other", [row(0.05, what=8.0), [math.nan] * NUM_FLOATS])
def test_calls_that_are_not_the_same_cannot_be_compared(other: list[float]) -> None:
    assert all(map(math.isnan, lateness([row(0.0), other], APART)))


def test_one_worker_waits_for_nobody() -> None:
    assert all(map(math.isnan, lateness([row(0.0)], APART)))


def test_gradients_and_buffers_follow_each_other_and_what_shards_is_waited_for() -> None:
    kinds = ["all_reduce", "all_reduce", "broadcast", "all_gather", "all_gather", "all_reduce"]
    assert number_runs([(0, kind) for kind in kinds]) == [0, 0, 1, 2, 3, 4]


def test_what_follows_in_the_next_step_is_another_meeting() -> None:
    assert number_runs([(step, "all_reduce") for step in (0, 0, 1, 1, 2)]) == [0, 0, 1, 1, 2]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """What torch's flight recorder has."""
    calls: list[dict[str, object]] = []
    monkeypatch.setattr(Arrivals, "_calls", lambda _: calls)
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", str(arrivals._KEPT))
    return calls


class Group:
    group_name = "save"


def called(number: int, moment: float) -> dict[str, object]:
    return {
        "record_id": number, "process_group": ("0", "default"), "collective_seq_id": number,
        "profiling_name": "gloo:all_reduce", "time_created_ns": int(moment * 1e9),
    }  # fmt: skip


def test_only_what_was_called_since_is_looked_at(recorded: list[dict[str, object]]) -> None:
    arrived = Arrivals(Group())  # type: ignore[arg-type]
    recorded += [called(number, number * 0.1) for number in range(10)]
    assert arrived.recent(step_s=0.1)[1] == 10
    recorded += [called(number, number * 0.1) for number in range(10, 14)]
    row = arrived.recent(step_s=0.1)
    assert row[1] == 4 and row[2:6] == pytest.approx([1.0, 1.1, 1.2, 1.3])
    assert len(row) == NUM_FLOATS


def test_calls_belong_to_the_step_in_which_they_were_made(
    recorded: list[dict[str, object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    arrived = Arrivals(Group())  # type: ignore[arg-type]
    for step in range(3):
        recorded += [called(2 * step + part, step + 0.1 * part) for part in range(2)]
        monkeypatch.setattr(arrivals.time, "time_ns", lambda step=step: int((step + 0.5) * 1e9))
        arrived.step_ended()
    arrived.recent(step_s=1.0)
    assert arrived._runs == [0, 0, 1, 1, 2, 2]


def test_less_than_a_step_says_nothing(recorded: list[dict[str, object]]) -> None:
    """As the calls of one step's end do, one right after the other."""
    recorded += [called(number, number * 0.001) for number in range(100)]
    assert all(map(math.isnan, Arrivals(Group()).recent(step_s=1.0)))  # type: ignore[arg-type]


@pytest.mark.parametrize("num_workers", [2, 3, 4, 7])
def test_the_median_of_the_others(num_workers: int) -> None:
    times = np.random.default_rng(num_workers).integers(5, size=(num_workers, 40)).astype(float)  # with ties
    for rank, found in enumerate(median_of_others(times)):
        others = np.delete(times, rank, axis=0)
        assert list(found) == [statistics.median(column) for column in others.T]


def test_as_long_as_nobody_is_late_one_meeting_of_four_is_looked_at(recorded: list[dict[str, object]]) -> None:
    arrived = Arrivals(Group())  # type: ignore[arg-type]

    def meet(late_s: float) -> bool:
        """Whether it was looked at."""
        begin = len(recorded)
        recorded.extend(called(number, 1.0 * number) for number in range(begin, begin + 10))
        mine = arrived.recent(step_s=1.0)
        late = arrived.compare([mine, [*mine[:2], *(moment + late_s for moment in mine[2:])]])
        return not math.isnan(late[1])

    assert [meet(0.0) for _ in range(5)] == [True, False, False, False, True]
    assert [meet(0.0) for _ in range(3)] == [False] * 3
    assert [meet(8.0) for _ in range(4)] == [True] * 4
