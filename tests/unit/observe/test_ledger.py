"""Where the time went: entries that add up to the wall time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.observe.heart import PHASES
from keepstep.observe.ledger import LINES, Ledger

seconds = st.floats(0, 1000)
phases = st.fixed_dictionaries(dict.fromkeys(PHASES, seconds))


@given(st.lists(st.tuples(phases, seconds, st.booleans()), max_size=4))
def test_entries_add_up_to_the_wall_time(attempts: list[tuple[dict[str, float], float, bool]]) -> None:
    """What the worker saw, and what came before it."""
    ledger = Ledger()
    for spent, before, after_failure in attempts:
        ledger.add_attempt(spent, sum(spent.values()) + before, after_failure)
    assert ledger.total_s == pytest.approx(sum(sum(spent.values()) + before for spent, before, _ in attempts))


def test_the_first_attempts_start_is_start_up_and_a_laters_is_recovery() -> None:
    ledger = Ledger()
    ledger.add_attempt({"start": 2.0, "step": 10.0, "data": 1.0}, 15.0, after_failure=False)
    assert (ledger.seconds["start"], ledger.seconds["recovery"]) == (4.0, 0.0)
    ledger.add_attempt({"start": 3.0, "replay": 5.0, "step": 10.0}, 19.0, after_failure=True)
    assert (ledger.seconds["start"], ledger.seconds["recovery"]) == (4.0, 4.0)
    assert (ledger.seconds["step"], ledger.seconds["replay"], ledger.seconds["data"]) == (20.0, 5.0, 1.0)


def test_an_attempt_that_died_before_its_first_beat_was_all_start_up() -> None:
    ledger = Ledger()
    ledger.add_attempt({}, 7.0, after_failure=False)
    assert ledger.seconds["start"] == ledger.total_s == 7.0


def test_clocks_that_disagree_make_no_negative_time() -> None:
    ledger = Ledger()
    ledger.add_attempt({"step": 10.0}, 9.9, after_failure=False)
    assert ledger.seconds["start"] == 0.0


def test_goodput_is_the_share_of_new_steps() -> None:
    ledger = Ledger()
    assert ledger.goodput == 0.0
    ledger.add_attempt({"step": 6.0, "replay": 2.0}, 12.0, after_failure=False)
    assert ledger.goodput == 0.5


def test_lines_say_what_took_time_and_what_share_it_was() -> None:
    ledger = Ledger()
    ledger.add_attempt({"step": 71.0, "data": 20.0, "checkpoint": 0.01}, 100.01, after_failure=False)
    lines = ledger.lines()
    assert [line.split()[0] for line in lines] == ["training", "waiting", "starting"]
    assert "71.0 s" in lines[0] and "71.0%" in lines[0]
    assert Ledger().lines() == []


def test_every_phase_has_a_line() -> None:
    assert set(PHASES) | {"recovery"} == set(LINES)
    assert len(set(LINES.values())) == len(LINES)
