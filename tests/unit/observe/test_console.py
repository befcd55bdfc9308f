"""The progress display: plain lines where nobody watches, a bar on a terminal."""

from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from keepstep.observe import console
from keepstep.observe.console import Display, format_metrics
from keepstep.observe.ledger import Ledger


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def on_terminal(monkeypatch: pytest.MonkeyPatch) -> tuple[Display, io.StringIO]:
    out = io.StringIO()
    monkeypatch.setattr(
        console, "Console", lambda **options: Console(file=out, force_terminal=True, width=100, highlight=False)
    )
    monkeypatch.setattr(console.sys.stderr, "isatty", lambda: True)
    return Display(), out


def test_a_file_gets_no_bar_though_colours_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    display = Display()
    display.expect(10)
    display.update(5, 0, {"loss": 0.5})
    display.close()
    assert capsys.readouterr().err.startswith("step 5/10  epoch 0  loss 0.5")


def test_metrics_are_short_and_without_the_place() -> None:
    assert format_metrics({"step": 3, "epoch": 0, "loss": 1.234567, "accuracy": 0.61}) == "loss 1.235  accuracy 0.61"
    assert format_metrics({}) == ""


def test_only_the_first_metrics_are_shown() -> None:
    assert format_metrics(dict.fromkeys("abcdef", 1.0)) == "a 1  b 1  c 1  d 1"


def test_a_metric_that_was_written_as_a_string_is_shown() -> None:
    assert format_metrics({"loss": "nan", "x": "inf"}) == "loss nan  x inf"


def test_plain_lines_come_now_and_then_and_at_the_end(capsys: pytest.CaptureFixture[str], clock: list[float]) -> None:
    display = Display()
    display.expect(100)
    for step in range(1, 101):
        display.update(step, 0, {"loss": 1 / step})
        clock[0] += 0.25
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in lines] == ["1/100", "41/100", "81/100", "100/100"]
    assert lines[1] == "step 41/100  epoch 0  loss 0.02439  4.0 steps/s"


def test_the_last_step_has_one_line_and_then_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    display = Display()
    display.expect(2)
    display.update(2, 0, {"loss": 0.5})
    display.update(2, 1, {"accuracy": 0.9})
    display.finish(2, {"loss": 0.5, "accuracy": 0.9}, Ledger())
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["step 2/2  epoch 0  loss 0.5", "keepstep: finished at step 2  loss 0.5  accuracy 0.9"]


def test_the_end_says_where_the_time_went(capsys: pytest.CaptureFixture[str]) -> None:
    ledger = Ledger()
    ledger.add_attempt({"step": 8.0, "data": 1.5}, 10.0, after_failure=False)
    Display().finish(2, {}, ledger)
    assert capsys.readouterr().err.splitlines()[-1] == (
        "keepstep: 10.0 s: 80% training, 15% waiting for data, 5% starting up"
    )


def test_without_a_known_end_the_step_stands_alone(capsys: pytest.CaptureFixture[str]) -> None:
    Display().update(7, 2, {})
    assert capsys.readouterr().err == "step 7  epoch 2\n"


def test_a_metric_stays_until_a_newer_value_comes(capsys: pytest.CaptureFixture[str], clock: list[float]) -> None:
    display = Display()
    display.update(1, 0, {"loss": 0.5, "accuracy": 0.9})
    clock[0] += 20
    display.update(2, 0, {"loss": 0.25})
    assert "loss 0.25  accuracy 0.9" in capsys.readouterr().err


def test_the_rate_starts_again_after_a_step_back(capsys: pytest.CaptureFixture[str], clock: list[float]) -> None:
    """A recovery: steps that are made again are no progress to divide by."""
    display = Display()
    display.update(100, 0, {})
    clock[0] += 20
    display.update(50, 0, {})
    clock[0] += 20
    display.update(90, 0, {})
    lines = capsys.readouterr().err.splitlines()
    assert "steps/s" not in lines[1]
    assert lines[2].endswith("2.0 steps/s")


def test_what_is_said_is_said_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    """Brackets are no mark-up, long lines are not broken, and output goes to standard error."""
    text = "keepstep: [red]list[0][/wrong] " + "x" * 200
    display = Display()
    display.say(text, style="red")
    captured = capsys.readouterr()
    assert captured.err == text + "\n" and captured.out == ""


def test_what_the_script_printed_is_passed_on_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    Display().echo("[bold]epoch[/bold] 1\n")
    captured = capsys.readouterr()
    assert captured.out == "[bold]epoch[/bold] 1\n" and captured.err == ""


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    display, out = on_terminal(monkeypatch)
    display.expect(10)
    display.update(5, 0, {"loss": 0.5})
    display.echo("[printed] by the script\n")
    display.close()
    display.close()
    text = out.getvalue()
    assert "step 5" in text and "loss 0.5" in text and "50%" in text
    assert "[printed] by the script" in text


def test_a_metrics_name_is_no_mark_up(monkeypatch: pytest.MonkeyPatch) -> None:
    display, out = on_terminal(monkeypatch)
    display.update(1, 0, {"acc[/top1]": 0.5})
    display.close()
    assert "acc[/top1] 0.5" in out.getvalue()


def test_closing_what_never_started_is_harmless(capsys: pytest.CaptureFixture[str]) -> None:
    Display().close()
    assert capsys.readouterr().err == ""
