"""What failed, whose fault it was, and whether another attempt makes sense."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.failure import (
    LOST_HOST,
    LOST_NODE,
    Decision,
    WorkerFailure,
    decide,
    describe,
    exit_cause,
    first_cause_first,
)


def error(step: int = 5, message: str = "bad", cause: str = "ValueError", **fields: Any) -> WorkerFailure:
    return WorkerFailure(fields.pop("rank", 0), cause, message, step=step, phase=fields.pop("phase", "step"), **fields)


def killed(step: int = 5, cause: str = "SIGKILL", **fields: Any) -> WorkerFailure:
    return error(step, "", cause, **fields)


LOST = {"cause": "RuntimeError", "message": "[gloo] Connection closed by peer [127.0.0.1]:4242"}


@pytest.mark.parametrize(
    ("attempts", "max_failures", "retry", "reason"),
    [
        # the first failure
        ([error()], 3, True, "failure 1 of 3 forgiven"),
        ([killed()], 3, True, "failure 1 of 3 forgiven"),
        ([error(cause="exit code 3", message="")], 3, True, "failure 1 of 3 forgiven"),
        ([error(step=0, phase="start")], 3, False, "the script failed before its first step: it would fail again"),
        ([killed(step=0, phase="start")], 3, True, "failure 1 of 3 forgiven"),
        ([error(step=0, phase="start", cause="exit code 1", message="")], 3, True, "failure 1 of 3 forgiven"),
        ([error(step=0, phase="start", **LOST)], 3, True, "failure 1 of 3 forgiven"),
        ([error(user_error=True)], 3, False, "this needs a change, not another try"),
        ([error(user_error=True, cause="DataError")], 0, False, "this needs a change, not another try"),
        # the same again
        ([error(), error()], 3, False, "the same error at the same step (5) twice: not retrying"),
        ([killed(), killed()], 3, True, "failure 2 of 3 forgiven"),
        ([killed(cause="SIGSEGV"), killed(cause="SIGSEGV")], 3, False, "the same error at the same step (5) twice"),
        ([killed(cause="SIGTERM"), killed(cause="SIGTERM")], 3, True, "failure 2 of 3 forgiven"),
        ([error(message="at 0x7f3a: 12"), error(message="at 0x99ff: 13")], 3, False, "the same error at the same step"),
        # another one
        ([error(5), error(6)], 3, True, "failure 2 of 3 forgiven"),
        ([error(message="a"), error(message="b")], 3, True, "failure 2 of 3 forgiven"),
        ([error(cause="ValueError"), error(cause="KeyError")], 3, True, "failure 2 of 3 forgiven"),
        ([error(5), killed(5), error(5)], 3, True, "failure 3 of 3 forgiven"),
        ([killed(5), error(step=0, phase="start")], 3, True, "failure 2 of 3 forgiven"),
        # the budget
        ([killed()], 0, False, "failure 1, and --max-failures is 0"),
        ([killed(1), killed(2)], 1, False, "failure 2, and --max-failures is 1"),
        ([killed(1), killed(2), killed(3), killed(4)], 3, False, "failure 4, and --max-failures is 3"),
    ],
)
def test_the_decision(attempts: list[WorkerFailure], max_failures: int, retry: bool, reason: str) -> None:
    decision = decide([[failure] for failure in attempts], max_failures)
    assert decision.retry is retry
    assert reason in decision.reason


def test_the_first_cause_decides_not_its_consequences() -> None:
    lost = error(rank=1, **LOST)
    assert not decide([[error(user_error=True), lost]], 3).retry
    assert decide([[killed(), lost], [killed(), lost]], 5).retry


@given(
    st.lists(st.sampled_from([error(), killed(), error(user_error=True), error(7), killed(3)]), min_size=1, max_size=8),
    st.integers(0, 5),
)
def test_more_than_the_budget_is_never_forgiven(attempts: list[WorkerFailure], max_failures: int) -> None:
    if len(attempts) > max_failures:
        assert not decide([[failure] for failure in attempts], max_failures).retry


@pytest.mark.parametrize(
    "message",
    [
        "[../third_party/gloo/pair.cc:575] Connection closed by peer [127.0.0.1]:55262",
        "Connection reset by peer",
        "Broken pipe",
        "recvBytes failed on SocketImpl(fd=3)",
        "NCCL Error 6: remote error or network error",
        "ncclRemoteError: A call failed possibly due to a network error",
        "Timed out waiting 1800000ms for recv operation to complete",
        "Application timeout caused pair closure",
    ],
)
def test_losing_touch_with_another_worker_is_a_consequence(message: str) -> None:
    assert error(cause="RuntimeError", message=message).is_consequence


@pytest.mark.parametrize(
    "failure",
    [
        error(message="loss is NaN"),
        error(cause="OutOfMemoryError", message="CUDA out of memory"),
        killed(),
        error(cause="exit code 1", message="Connection closed by peer"),
        error(user_error=True, message="Connection refused"),
    ],
)
def test_other_failures_are_causes(failure: WorkerFailure) -> None:
    assert not failure.is_consequence


def test_an_error_by_its_class_alone_is_a_consequence() -> None:
    assert error(cause="DistNetworkError", message="").is_consequence


def test_causes_come_before_consequences_then_the_earlier_first() -> None:
    lost_early = error(rank=2, moment=1.0, **LOST)
    late, later = killed(rank=3, moment=2.0), error(rank=0, moment=3.0)
    same_time = killed(rank=1, moment=2.0)
    ordered = first_cause_first([later, lost_early, late, same_time])
    assert [failure.rank for failure in ordered] == [1, 3, 0, 2]


@pytest.mark.parametrize(
    ("code", "cause"), [(0, "exit code 0"), (3, "exit code 3"), (-9, "SIGKILL"), (-11, "SIGSEGV"), (-200, "SIG200")]
)
def test_exit_codes_by_name(code: int, cause: str) -> None:
    assert exit_cause(code) == cause
    assert not WorkerFailure(0, cause).is_exception


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL])
def test_a_crash_of_its_own_that_comes_again_is_not_tried_a_third_time(number: signal.Signals) -> None:
    crash = killed(cause=exit_cause(-number))
    assert not decide([[crash], [crash]], 9).retry


def test_a_signature_forgets_addresses_and_numbers_not_words_or_steps() -> None:
    assert error(message="tensor 12 at 0xdeadbeef").signature == error(message="tensor 7 at 0x1").signature
    assert error(message="tensor x").signature != error(message="tensor y").signature
    assert error(1).signature != error(2).signature


def test_the_report_names_every_failed_rank_first_cause_first() -> None:
    cause = error(rank=2, step=40, message="bad\nsample", traceback="Traceback\n  line", log_tail="never shown")
    text = describe([cause, error(rank=0, step=40, **LOST), killed(rank=1, step=39)])
    assert text.splitlines() == [
        "rank 2 at step 40, step phase: ValueError: bad",
        "sample",
        "  | Traceback",
        "  |   line",
        "  then rank 0 at step 40: lost touch with the others (RuntimeError)",
        "  then rank 1 at step 39, step phase: SIGKILL",
    ]


def test_without_a_traceback_the_end_of_the_log_is_shown() -> None:
    text = describe([killed(log_tail="epoch 1\nloss 0.5\n")])
    assert text.splitlines() == [
        "rank 0 at step 5, step phase: SIGKILL",
        "  the end of its log:",
        "  | epoch 1",
        "  | loss 0.5",
    ]


def test_a_users_error_is_its_message_which_says_what_to_do() -> None:
    mistake = error(user_error=True, cause="DataError", message="use 4 or 8", traceback="long")
    assert describe([mistake, error(rank=1)]) == "use 4 or 8"


def test_lost_nodes_are_forgiven_without_end_and_not_counted() -> None:
    lost = [WorkerFailure(1, LOST_NODE, step=7)]
    own = [WorkerFailure(0, "SIGKILL", step=7)]
    assert decide([lost] * 9, max_failures=0) == Decision(True, "a node is gone")
    assert decide([lost, lost, own], max_failures=1) == Decision(True, "failure 1 of 1 forgiven")
    assert not decide([own, lost, own], max_failures=1).retry
    assert decide([[WorkerFailure(1, LOST_HOST)]] * 2, max_failures=1).retry is False
