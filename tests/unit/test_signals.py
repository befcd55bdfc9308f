"""The first request to stop is noted, the second one stops at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepstep.observe.heart import Heart, Pulse
from keepstep.signals import StopRequest, StopSignals, signals_kept


@pytest.fixture(autouse=True)
def _handlers_put_back() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_is_a_request_and_the_second_stops_at_once(number: signal.Signals) -> None:
    requests: list[str] = []
    StopSignals(lambda: requests.append("asked"))
    signal.raise_signal(number)
    assert requests == ["asked"]
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)
    assert requests == ["asked"]


def test_after_the_second_the_old_handlers_are_back() -> None:
    seen: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    StopSignals(lambda: None)
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)
    try:
        signal.raise_signal(signal.SIGTERM)
    except KeyboardInterrupt:
        pytest.fail("the third signal is not ours")
    assert seen == [signal.SIGTERM]


def test_restoring_puts_the_old_handlers_back_once() -> None:
    def mine(number: int, frame: object) -> None: ...

    signal.signal(signal.SIGTERM, mine)
    signals = StopSignals(lambda: None)
    assert signal.getsignal(signal.SIGTERM) is not mine
    signals.restore()
    assert signal.getsignal(signal.SIGTERM) is mine
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signals.restore()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_thread_that_gets_no_signals_installs_none() -> None:
    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=lambda: StopSignals(lambda: None).restore())
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_process_of_its_own_is_asked_by_signal(capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    request = StopRequest(Heart(None), supervised=False)
    assert not request.requested
    signal.raise_signal(signal.SIGTERM)
    assert request.requested
    assert "asked to stop: saving at the next step (again: stop at once)" in capsys.readouterr().err
    request.restore()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_supervised_worker_is_asked_through_its_heart(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    request = StopRequest(Heart(tmp_path / "rank_0"), supervised=True)
    assert signal.getsignal(signal.SIGTERM) is before, "signals are the supervisor's"
    assert not request.requested
    Pulse(tmp_path / "rank_0").ask_to_stop()
    assert request.requested
    request.restore()


def test_a_signal_that_a_library_took_is_taken_back() -> None:
    requests: list[str] = []
    before = signal.getsignal(signal.SIGTERM)
    signals = StopSignals(lambda: requests.append("asked"))
    signal.signal(signal.SIGTERM, lambda number, frame: requests.append("the library's"))
    signals.rearm()
    signal.raise_signal(signal.SIGTERM)
    assert requests == ["asked"]
    signals.restore()
    signals.rearm()  # after the run it is nobody's
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_library_that_takes_signals_gives_them_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with signals_kept():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGTERM) is before
