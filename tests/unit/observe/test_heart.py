"""The heartbeat: cheap to write, and readable from outside even after the worker was killed."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from keepstep.observe.heart import (
    CHECKPOINT,
    DATA,
    IDLE,
    PHASES,
    REPLAY,
    START,
    STEP,
    TRANSFER,
    VALIDATION,
    Heart,
    Pulse,
)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that is set by hand."""
    now = [1000.0]
    monkeypatch.setattr(time, "time", lambda: now[0])
    monkeypatch.setattr(time, "perf_counter", lambda: now[0] - 900.0)
    return now


def test_time_is_booked_to_the_phase_it_was_spent_in(clock: list[float]) -> None:
    heart = Heart(None)
    for phase, seconds in ((DATA, 1.0), (STEP, 2.0), (DATA, 4.0), (CHECKPOINT, 8.0), (IDLE, 16.0), (REPLAY, 32.0)):
        clock[0] += seconds  # in the phase before
        heart.enter(phase)
    clock[0] += 64.0
    assert heart.totals() == {
        "start": 1.0,
        "data": 2.0 + 8.0,
        "step": 4.0,
        "checkpoint": 16.0,
        "idle": 32.0,
        "replay": 64.0,
        "transfer": 0.0,
        "validation": 0.0,
    }


def test_asking_for_totals_twice_counts_once(clock: list[float]) -> None:
    heart = Heart(None)
    clock[0] += 5.0
    heart.totals()
    assert heart.totals()["start"] == 5.0


def test_a_workers_start_counts_from_its_launch(clock: list[float]) -> None:
    heart = Heart(None, started=990.0)
    heart.enter(DATA)
    assert heart.totals()["start"] == pytest.approx(10.0)


def test_the_supervisor_sees_what_the_worker_wrote(tmp_path: Path, clock: list[float]) -> None:
    heart = Heart(tmp_path / "rank_0")
    pulse = Pulse(tmp_path / "rank_0")
    heart.enter(STEP)
    heart.beat(42)
    assert (pulse.step, pulse.phase) == (42, "step")
    clock[0] += 3.0
    assert pulse.totals()["step"] == 3.0, "the phase under way counts, too"
    heart.enter(DATA)
    clock[0] += 1.0
    assert (pulse.totals()["step"], pulse.totals()["data"]) == (3.0, 1.0)


def test_a_heartbeat_outlives_its_worker(tmp_path: Path) -> None:
    heart = Heart(tmp_path / "rank_0")
    heart.enter(CHECKPOINT)
    heart.beat(7)
    del heart
    pulse = Pulse(tmp_path / "rank_0")
    assert (pulse.step, pulse.phase) == (7, "checkpoint")


def test_the_stop_flag_goes_the_other_way(tmp_path: Path) -> None:
    heart, pulse = Heart(tmp_path / "rank_0"), Pulse(tmp_path / "rank_0")
    assert not heart.asked_to_stop
    pulse.ask_to_stop()
    assert heart.asked_to_stop


def test_a_request_to_stop_before_the_worker_is_up_is_not_lost(tmp_path: Path) -> None:
    Pulse(tmp_path / "rank_0").ask_to_stop()
    assert Heart(tmp_path / "rank_0").asked_to_stop


def test_a_new_attempt_starts_from_nothing(tmp_path: Path) -> None:
    heart = Heart(tmp_path / "rank_0")
    heart.beat(9)
    heart.enter(STEP)
    pulse = Pulse(tmp_path / "rank_0")
    pulse.ask_to_stop()
    pulse.reset()
    assert (pulse.step, pulse.phase) == (0, "start")
    assert pulse.totals() == dict.fromkeys(PHASES, 0.0), "no worker yet: no time goes by"
    again = Heart(tmp_path / "rank_0")
    assert not again.asked_to_stop and pulse.step == 0


def test_a_worker_that_starts_over_its_own_heart_forgets_the_old_totals(tmp_path: Path, clock: list[float]) -> None:
    first = Heart(tmp_path / "rank_0")
    clock[0] += 10
    first.enter(STEP)
    assert sum(Heart(tmp_path / "rank_0").totals().values()) == 0.0


def test_phases_are_numbered_by_name() -> None:
    numbers = (START, DATA, TRANSFER, STEP, REPLAY, CHECKPOINT, VALIDATION, IDLE)
    assert tuple(PHASES[number] for number in numbers) == PHASES


def test_a_beat_costs_next_to_nothing() -> None:
    heart = Heart(None)
    began = time.perf_counter()
    for step in range(20_000):
        heart.enter(STEP)
        heart.beat(step)
        heart.enter(DATA)
    assert (time.perf_counter() - began) / 20_000 < 50e-6
