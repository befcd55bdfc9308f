"""Faults: drawn from a seed, of every kind, spread over the run."""

from __future__ import annotations

import pytest

from keepstep.errors import ConfigError
from keepstep.verify.plan import ALL, KILLS, RANK, SAVE, STOP, checkpoint_interval, draw


@pytest.mark.parametrize("seed", range(50))
@pytest.mark.parametrize("kills", [1, 2, 3, 7])
def test_faults_are_of_every_kind_and_spread(seed: int, kills: int) -> None:
    faults = draw(seed, kills, num_steps=100, every=10, workers=4)
    kinds = [fault.kind for fault in faults]
    assert len(faults) == kills + 1 and kinds.count(STOP) == 1
    assert kills < 3 or set(KILLS) <= set(kinds)
    assert all(1 <= fault.step <= 100 for fault in faults)
    others = [fault.step for fault in faults if fault.kind != SAVE]
    assert others == sorted(others)
    for fault in faults:
        assert fault.kind != SAVE or fault.step % 10 == 0
        assert fault.kind != RANK or len(fault.ranks) == 1
        assert fault.kind != ALL or fault.ranks == (0, 1, 2, 3)
        assert 0 <= fault.delay < 1
    stop = next(fault for fault in faults if fault.kind == STOP)
    assert stop.step < 75  # another number of workers goes on from there


def test_a_seed_draws_the_same_faults_again() -> None:
    assert draw(3, 5, 100, 10, 2) == draw(3, 5, 100, 10, 2)
    assert draw(3, 5, 100, 10, 2) != draw(4, 5, 100, 10, 2)


def test_a_run_that_is_too_short_is_refused() -> None:
    with pytest.raises(ConfigError, match="8 steps, which is too few for 4 faults"):
        draw(0, 3, 8, 1, 1)


def test_the_interval_is_the_given_one_unless_hardly_anything_would_be_saved() -> None:
    assert checkpoint_interval(5, 40) == 5
    assert checkpoint_interval(500, 40) == checkpoint_interval(None, 40) == 4
    assert checkpoint_interval(None, 5) == 1
