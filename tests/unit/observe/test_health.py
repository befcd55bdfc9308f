"""Verdicts from heartbeats that are made by hand: each fault is named, and a sound run is left alone."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from keepstep.observe.health import Health, Verdict
from keepstep.observe.heart import Reading
from unit.observe.readings import reading

MB = 2**20
Worker = Callable[[float], Reading]
"""A worker's heartbeat after so many seconds."""


def watch(workers: list[Worker], seconds: float = 30.0) -> list[Verdict]:
    """Looks twice a second, as the supervisor does."""
    health, found, now = Health(), [], 0.0
    while now < seconds:
        now += 0.5
        found += health.look(1000.0 + now, {rank: worker(now) for rank, worker in enumerate(workers)})
    return found


def steady(
    step_s: float = 0.02,
    data: float = 0.05,
    lateness: float = 0.02,
    grows: Callable[[float], float] = lambda _: 0.0,
    device: Callable[[float], float] = lambda _: math.nan,
) -> Worker:
    """Steps of one length; `data`: the share of the time that is waited for data."""

    def at(now: float) -> Reading:
        return reading(
            int(now / step_s), noted=int(now), data=data * now, step=(1 - data) * now, lateness=lateness,
            host_bytes=400 * MB + grows(now), host_free=8000 * MB, device_bytes=device(now), device_free=1000 * MB,
        )  # fmt: skip

    return at


def test_sound_workers_are_left_alone() -> None:
    rng = random.Random(0)
    noisy = [steady(lateness=0.3 * rng.random()) for _ in range(4)]
    assert watch([steady()]) == [] and watch([steady(), steady()]) == []
    assert watch([steady(data=0.25), steady(data=0.28)]) == []
    assert watch(noisy[:1]) == []


def test_workers_that_wait_for_data_are_input_bound() -> None:
    (verdict,) = watch([steady(data=0.42), steady(data=0.42)])
    assert (verdict.kind, verdict.rank) == ("stall", None)
    assert str(verdict).startswith("input-bound: 42% of the step time is spent waiting for data; raise num_workers")


def test_a_loader_that_is_slow_from_the_start_is_seen_within_seconds() -> None:
    assert len(watch([steady(data=0.5)], seconds=9.0)) == 1


def test_who_is_always_last_is_a_straggler() -> None:
    (verdict,) = watch([steady(lateness=0.01), steady(lateness=0.45), steady(lateness=0.02)])
    assert (verdict.kind, verdict.rank, verdict.figure) == ("straggler", 1, 0.45)
    assert "rank 1 is a straggler, 1.8 times the median" in verdict.text and "in the step phase" in verdict.text


def test_a_straggler_that_waits_for_its_data_is_told_so() -> None:
    (verdict,) = watch([steady(), steady(data=0.5, lateness=0.4)])
    assert (verdict.kind, verdict.rank) == ("straggler", 1) and "in the data phase" in verdict.text


def test_workers_that_take_turns_in_being_late_are_no_stragglers() -> None:
    def in_turns(rank: int) -> Worker:
        return lambda now: steady(lateness=0.5 if int(now) % 2 == rank else 0.0)(now)

    assert watch([in_turns(0), in_turns(1)]) == []


def test_memory_that_grows_with_every_step_is_a_leak() -> None:
    (verdict,) = watch([steady(), steady(grows=lambda now: 50 * MB * now * 12)])
    assert (verdict.kind, verdict.rank) == ("leak", 1)
    assert "host memory of rank 1 grows 12.6 MB a step" in verdict.text and "last 13 seconds" in verdict.text


def test_device_memory_is_watched_too() -> None:
    (verdict,) = watch([steady(device=lambda now: 900 * MB + 20 * MB * now)])
    assert "device memory of rank 0 grows" in verdict.text and "last 50 seconds" in verdict.text


@pytest.mark.parametrize(
    "grows",
    [
        lambda now: 600 * MB * min(now, 8.0) / 8.0,  # a cache that fills
        lambda now: 200 * MB * (int(now) % 5) / 5,  # a saw
        lambda now: 30 * MB * now / 30,
        lambda now: 500 * MB if now > 20 else 0.0,  # the first validation
    ],
)
def test_memory_that_levels_off_is_none(grows: Callable[[float], float]) -> None:
    assert watch([steady(grows=grows)], seconds=60.0) == []


def test_blocks_that_an_allocator_adds_while_shapes_are_new_are_none() -> None:
    """As seen: steps of a second, 1.7 GB more in a straight line over the first 170 of them, then not a byte."""
    assert watch([steady(step_s=1.0, grows=lambda now: 10 * MB * min(now, 170.0))], seconds=600.0) == []


def test_a_leak_of_slow_steps_is_told_later_but_before_memory_is_gone() -> None:
    (verdict,) = watch([steady(step_s=1.0, grows=lambda now: 10 * MB * now)], seconds=330.0)
    assert verdict.kind == "leak" and watch([steady(step_s=1.0, grows=lambda now: 10 * MB * now)], seconds=250.0) == []
    (verdict,) = watch([steady(step_s=1.0, device=lambda now: 30 * MB * now)], seconds=30.0)  # of which 1 GB is free
    assert "device memory of rank 0 grows" in verdict.text
    # 8 GB are free: enough for one that leaks so for 300 steps, and not for eight.
    all_leak = watch([steady(step_s=1.0, grows=lambda now: 10 * MB * now)] * 8, seconds=100.0)
    assert {verdict.kind for verdict in all_leak} == {"leak"} and len(all_leak) == 8


def test_steps_that_become_slower_are_noticed_with_their_phase() -> None:
    def at(now: float) -> Reading:
        late = max(0.0, now - 30.0)
        steps = int((now - late) / 0.02 + late / 0.06)
        return reading(steps, noted=0, step=(now - late) + late / 3, data=late * 0.2, transfer=late * 7 / 15)

    found = watch([at], seconds=60.0)
    assert [verdict.kind for verdict in found] == ["slowdown"]
    assert "times as long as earlier" in found[0].text and "transfer phase" in found[0].text


def test_the_first_steps_say_nothing() -> None:
    """They compile, and read the first samples."""

    def at(now: float) -> Reading:
        return steady()(now) if now > 4.0 else reading(int(now), data=now)

    assert watch([at]) == []


def test_a_verdict_is_given_once() -> None:
    assert len(watch([steady(data=0.9)], seconds=120.0)) == 1
