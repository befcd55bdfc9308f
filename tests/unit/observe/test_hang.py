"""A hang is told from a long step, and the one who hangs from those who wait for it."""

from __future__ import annotations

import sysconfig

import pytest

from keepstep.failure import WorkerFailure
from keepstep.observe.hang import HangWatch, Request, different_calls
from keepstep.observe.heart import Reading
from keepstep.observe.stacks import Frame, newest_stack, where
from unit.observe.readings import reading

MINE = "/home/me/train.py"
SITE = sysconfig.get_path("purelib")
LOCKED = [Frame(MINE, 33, "augment"), Frame(MINE, 40, "main")]
WAITING = [Frame(f"{SITE}/torch/autograd/graph.py", 900, "_engine_run_backward"), Frame(MINE, 41, "main")]
REDUCING = [Frame(f"{SITE}/torch/distributed/distributed_c10d.py", 3000, "all_reduce"), Frame(MINE, 50, "main")]


def begun(timeout_s: float, workers: int = 1) -> HangWatch:
    """Its workers have made their first steps."""
    hang = HangWatch(timeout_s)
    for step in range(4):
        hang.look(-4.0 + step, {rank: reading(step) for rank in range(workers)}, {})
    return hang


def watch(
    hang: HangWatch, readings: dict[int, Reading], stacks: dict[int, list[Frame]], begin: float, seconds: float
) -> list[Request]:
    asked = []
    for tick in range(int(2 * seconds)):
        request = hang.look(begin + tick / 2, readings, stacks)
        asked += [request] if request is not None else []
    return asked


def test_who_stands_still_in_its_own_code_hangs_and_the_others_wait_for_it() -> None:
    hang = begun(10.0, workers=2)
    still = {0: reading(41), 1: reading(41)}
    assert watch(hang, still, {}, 0.0, 9.0) == []
    assert watch(hang, still, {0: WAITING, 1: LOCKED}, 9.0, 10.0) == [Request.LOOK, Request.LOOK, Request.ABORT]
    verdict = hang.verdict
    assert verdict is not None and hang.aborted and verdict.rank == 1
    assert "rank 1 hangs in the step phase of step 42 since 1" in verdict.text
    assert "at train.py:33 in augment" in verdict.text
    assert "rank 0 waits in step 42 at train.py:41 in main, inside graph.py:900 in _engine_run_backward" in verdict.text


def test_where_all_wait_in_different_places_the_one_ahead_has_left_something_out() -> None:
    hang = begun(10.0, workers=2)
    watch(hang, {0: reading(41), 1: reading(42)}, {0: REDUCING, 1: WAITING}, 0.0, 20.0)
    assert hang.verdict is not None and hang.verdict.rank == 1
    assert "all must make the same collective calls" in hang.verdict.advice


def test_a_step_that_takes_as_long_as_others_did_is_none() -> None:
    hang = begun(10.0)
    now = 0.0
    for step in range(4, 7):
        assert watch(hang, {0: reading(step)}, {0: LOCKED}, now, 8.0) == []
        now += 8.0
    assert watch(hang, {0: reading(7)}, {0: LOCKED}, now, 35.0) == [], "five times the longest before it"


def test_a_stack_that_moves_is_work() -> None:
    """A validation without a loader of keepstep's, say."""
    hang = begun(6.0)
    still = {0: reading(4)}
    for tick in range(120):
        assert hang.look(tick / 2, still, {0: [Frame(MINE, tick, "evaluate")]}) is not Request.ABORT
    assert hang.verdict is None


@pytest.mark.parametrize(("phase", "patience"), [("start", 10), ("idle", 10), ("checkpoint", 10), ("validation", 1)])
def test_what_is_not_the_loop_may_take_longer(phase: str, patience: int) -> None:
    hang = begun(6.0)
    still = {0: reading(4, phase)}
    assert watch(hang, still, {0: LOCKED}, 0.0, 6.0 * patience - 1) == []
    assert watch(hang, still, {0: LOCKED}, 6.0 * patience - 1, 10.0) != []


def test_the_first_steps_may_compile_for_minutes() -> None:
    hang = HangWatch(6.0)
    assert watch(hang, {0: reading(0)}, {0: LOCKED}, 0.0, 59.0) == []
    assert watch(hang, {0: reading(0)}, {0: LOCKED}, 59.0, 10.0) != []


def test_who_stands_in_a_debugger_thinks() -> None:
    hang = begun(2.0)
    thinking = [Frame("/usr/lib/python3.11/cmd.py", 126, "cmdloop"), Frame("/usr/lib/python3.11/pdb.py", 3, "_cmdloop")]
    assert Request.ABORT not in watch(hang, {0: reading(41)}, {0: [*thinking, *LOCKED]}, 0.0, 100.0)
    assert hang.verdict is None


def test_a_script_that_waits_outside_of_the_loop_is_reported_and_left_alone() -> None:
    hang = HangWatch(1.0)
    assert Request.ABORT not in watch(hang, {0: reading(3, "idle")}, {0: LOCKED}, 0.0, 30.0)
    assert hang.verdict is not None and not hang.aborted


def test_no_hang_is_looked_for_where_none_is_wanted() -> None:
    assert watch(HangWatch(0.0), {0: reading(3)}, {0: LOCKED}, 0.0, 100.0) == []


def test_the_newest_dump_counts_and_of_it_the_main_thread() -> None:
    def dump(line: int) -> str:
        return (
            "\n=== keepstep: stacks ===\n"
            "Thread 0x00007f0001 (most recent call first):\n"
            '  File "/usr/lib/python3.11/threading.py", line 10 in wait\n\n'
            "Current thread 0x00007f0002 (most recent call first):\n"
            f'  File "{MINE}", line {line} in augment\n'
            f'  File "{MINE}", line 40 in main\n'
        )

    assert newest_stack(dump(7) + dump(33)) == LOCKED
    assert newest_stack("") == [] and newest_stack("\n=== keepstep: stacks ===\n") == []
    assert where(LOCKED) == "train.py:33 in augment"
    assert where([]) == "where it is could not be read"


def test_workers_that_met_in_different_calls_are_told_where_they_were() -> None:
    failures = [
        WorkerFailure(0, "SIGABRT", "at train.py:19 in main, inside distributed_c10d.py:3252 in all_reduce", step=60),
        WorkerFailure(1, "RuntimeError", "closed", f'  File "{MINE}", line 22, in main\n    loss.backward()', step=60),
    ]
    text = different_calls(failures).text
    assert text.startswith("the workers made different collective calls in step 61: rank 0 was at train.py:19 in main")
    assert text.endswith("rank 1 was at train.py:22 in main")
