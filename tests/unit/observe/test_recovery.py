"""The phases of a recovery: the supervisor's marks and a worker's make one line of time."""

from __future__ import annotations

import time

import pytest

from keepstep.job import Job
from keepstep.observe.recovery import PHASES, Death, Recovery, describe, marks


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What `time.time` says, one after the other."""
    moments: list[float] = []
    monkeypatch.setattr(time, "time", lambda: moments.pop(0))
    return moments


def job(death: Death | None, launched: float) -> Job:
    return Job({}, "a", "/hearts", in_process=False, launched=launched, death=marks(death) if death else None)


def test_the_phases_follow_each_other_without_a_gap(clock: list[float]) -> None:
    clock += [104.0, 106.0, 109.5]
    recovery = Recovery(job(Death(100.0, 100.05, 100.25), launched=100.5), began=103.0)  # met at 104
    recovery.mark()  # loaded
    seconds = recovery.seconds()
    assert seconds == {
        "detect": 0.05,
        "tear_down": 0.2,
        "start": 0.25,
        "import": 2.5,
        "rendezvous": 1.0,
        "load": 2.0,
        "first_step": 3.5,
    }
    assert list(seconds) == list(PHASES)
    assert sum(seconds.values()) == pytest.approx(9.5)


def test_a_loss_goes_to_the_workers_with_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    told = job(Death(1.0, 2.0, 3.0), launched=4.0)
    monkeypatch.setenv("KEEPSTEP_JOB", told.to_json())
    got = Job.from_environment()
    assert got is not None and tuple(got.death or ()) == (1.0, 2.0, 3.0)


@pytest.mark.parametrize("told", [None, job(None, launched=4.0)])
def test_where_nothing_was_lost_nothing_was_recovered(told: Job | None) -> None:
    recovery = Recovery(told, began=5.0)
    recovery.mark()
    assert recovery.seconds() is None


def test_another_machines_clock_makes_no_negative_time(clock: list[float]) -> None:
    clock += [11.0, 12.0, 13.0]
    recovery = Recovery(job(Death(8.0, 9.0, 10.0), launched=10.5), began=10.2)
    recovery.mark()
    seconds = recovery.seconds()
    assert seconds is not None and seconds["import"] == 0.0 and min(seconds.values()) >= 0.0


def test_one_line_says_it() -> None:
    seconds = dict(zip(PHASES, (0.05, 0.004, 0.008, 0.004, 0.038, 0.127, 0.032), strict=True))
    assert describe(seconds) == (
        "recovered in 0.3 s: detect 0.05, tear_down 0.00, start 0.01, import 0.00, rendezvous 0.04, load 0.13, "
        "first_step 0.03"
    )
