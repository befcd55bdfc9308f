"""Losses that are no numbers, or explode, are named with their step; noise and progress are not."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from keepstep.observe.health import Verdict
from keepstep.observe.loss import LossWatch


def lines(*values: Any, name: str = "loss") -> list[dict[str, Any]]:
    return [{"step": step, "epoch": 0, name: value} for step, value in enumerate(values, 1)]


def look(*values: Any, name: str = "loss") -> list[Verdict]:
    return LossWatch().look(lines(*values, name=name))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, "nan", "inf"])
def test_what_is_no_number_is_said_once_with_its_first_step(value: Any) -> None:
    (verdict,) = look(1.0, 0.9, value, value, 0.8, value)
    assert verdict.text == f"loss is {float(value)} from step 3 on" and verdict.figure == 3.0


def test_a_loss_that_explodes_and_stays_there() -> None:
    calm = [0.5 + 0.01 * (step % 7) for step in range(40)]
    (verdict,) = look(*calm, 30.0, 60.0, 120.0, 240.0)
    assert verdict.text.startswith("loss explodes: 120 at step 43, ") and "before step 41" in verdict.text


def test_progress_noise_and_single_bad_batches_are_left_alone() -> None:
    rng = random.Random(0)
    assert look(*(2.3 * math.exp(-step / 30) + 0.05 * rng.random() for step in range(300))) == []
    assert look(*([0.5] * 30 + [40.0] + [0.5] * 30 + [40.0, 40.0] + [0.5] * 5)) == []
    assert look(*(rng.lognormvariate(0, 0.7) for _ in range(2000))) == []
    assert look(*(1.0 for _ in range(30)), *(50.0 for _ in range(30)), name="learning_rate") == []
    assert look(*(-1.0 for _ in range(30)), *(50.0 for _ in range(30))) == [], "a sign says nothing about a size"
