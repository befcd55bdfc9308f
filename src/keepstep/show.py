"""`keepstep runs` and `keepstep show`: what the run folders say."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from keepstep.checkpoint.untrusted import shown
from keepstep.config import check_run_name
from keepstep.errors import RunFolderError
from keepstep.folder import RunFolder, check_numbers
from keepstep.observe.console import format_metrics, printable
from keepstep.observe.ledger import LINES, Ledger
from keepstep.observe.recovery import describe
from keepstep.storage import Storage


def existing_run(storage: str | Path, name: str) -> RunFolder:
    """The folder of a run; a wrong name is answered with the right ones."""
    check_run_name(name)
    folder = RunFolder(storage, name)
    folder.fetch()
    if not folder.path.is_dir():
        known = ", ".join(run.name for run in _all_runs(storage)[:8]) or "none"
        raise RunFolderError(f"there is no run {name!r} in {storage}; there are: {known} (another folder: --storage)")
    return folder


def status_of(folder: RunFolder) -> str:
    """finished, stopped, failed, running, or interrupted: it died without a word."""
    if folder.is_held():
        return "running"
    status: str = folder.read_result().get("status", "interrupted")
    return status


def print_runs(storage: str | Path) -> int:
    runs = _all_runs(storage)
    if not runs:
        print(f"no runs in {storage}; keepstep run SCRIPT makes one")
        return 0
    table = Table("run", "status", "step", "workers", "metrics", "last change", box=None, pad_edge=False)
    for folder in runs:
        try:
            described = _described(folder)
        except RunFolderError as error:  # one bad run must not hide the others
            described = ("unreadable", "", "", str(error))
        table.add_row(*map(printable, (folder.name, *described, _ago(folder))))
    Console(markup=False, emoji=False).print(table)
    return 0


def _described(folder: RunFolder) -> tuple[object, ...]:
    """Status, step, workers and metrics."""
    settings, metrics = folder.read_config().get("settings", {}), _latest(folder)
    step = folder.read_result().get("step", metrics.get("step", 0))
    workers = f"{settings.get('workers', '?')} {settings.get('strategy', '')}"
    return status_of(folder), step, workers, format_metrics(metrics)


def print_run(storage: str | Path, name: str) -> int:
    folder = existing_run(storage, name)
    config, events, result = folder.read_config(), folder.read_events(), folder.read_result()
    settings = config.get("settings", {})
    console = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
    console.print(Text.assemble((name, "bold"), f"  {printable(status_of(folder))}, in {folder.where}"))
    if config:
        words = [config.get("script", "?"), *config.get("arguments", [])]
        console.print(f"script     {printable(' '.join(map(str, words)))}")
        kept = ("engine", "workers", "strategy", "precision", "device", "seed", "checkpoint_every", "keep", "keep_best")
        chosen = "  ".join(f"{key}={settings[key]}" for key in kept if settings.get(key) and settings[key] != "auto")
        console.print(f"settings   {printable(chosen)}")
    metrics = _latest(folder)
    console.print(f"step       {result.get('step', metrics.get('step', 0))}")
    console.print(f"metrics    {format_metrics(metrics) or 'none yet'}")
    steps = folder.store_to_read().steps()
    console.print(f"checkpoints  {', '.join(map(str, steps)) or 'none'}")
    try:
        for event in events:
            for line in _event_lines(event):
                console.print(printable(line))
        ledger = total_ledger(events, result, folder.read_ledger())
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, OSError) as error:
        raise RunFolderError(f"{folder.events} has an event that keepstep did not write: {shown(error)}") from None
    if ledger.total_s:
        console.print(f"where the time went ({ledger.total_s:.1f} s, {ledger.goodput:.0%} of it new steps)")
        for line in ledger.lines():
            console.print("  " + line)
    return 0


def total_ledger(events: list[dict[str, Any]], result: dict[str, Any], live: dict[str, Any] | None = None) -> Ledger:
    """All launches of a run together, with the one under way."""
    ledger = Ledger()
    ended = [event["seconds"] for event in events if event["event"] == "ended"] or [result.get("seconds", {})]
    ended.append((live or {}).get("seconds", {}))
    for seconds in ended:
        for entry in LINES:
            ledger.seconds[entry] += seconds.get(entry, 0.0)
    return ledger


def _event_lines(event: dict[str, Any]) -> Iterator[str]:
    at = time.strftime("%H:%M:%S", time.localtime(event["time"]))
    if event["event"] == "failed":
        for number, failure in enumerate(event["failures"]):
            first = "failed" if number == 0 else "then"
            what = f"{failure['cause']} {failure['message']}"
            yield f"{at}  {first}: rank {failure['rank']} at step {failure['step']}: {what}"
        yield f"{at}  {event['reason']}"
    elif event["event"] == "resumed":
        yield f"{at}  resumed from step {event['step']}"
    elif event["event"] == "recovered":
        yield f"{at}  {describe(event['seconds'])}"
    elif event["event"] == "checkpoint_passed_over":
        yield f"{at}  passed over: {event['problem']}"
    elif event["event"] == "sink_problem":
        yield f"{at}  {event['sink']}: {event['problem']}"
    elif event["event"] == "no_checkpoint_left":
        yield f"{at}  no good checkpoint was left: started from step 0 (metrics until then: {event['metrics_kept']})"
    elif event["event"] == "verdict":
        yield f"{at}  {event['text']}; {event['advice']}"
        for rank, frames in event.get("stacks", {}).items():
            yield f"          rank {rank}: {' < '.join(map(str, frames[:6]))}"
    elif event["event"] in ("stopped", "finished"):
        yield f"{at}  {event['event']} at step {event['step']}"


def _latest(folder: RunFolder) -> dict[str, Any]:
    latest: dict[str, Any] = {}
    for line in folder.read_metrics():
        latest.update(line)
    check_numbers(latest, folder.metrics)
    return latest


def _all_runs(storage: str | Path) -> list[RunFolder]:
    place = Storage.parse(storage)
    for name in place.names():
        with contextlib.suppress(RunFolderError):  # what is wrong with it is said where it is listed
            RunFolder(storage, name).fetch()
    if not place.folder.is_dir():
        return []
    entries = place.folder.iterdir()
    paths = [path for path in entries if (path / "events.jsonl").exists() or (path / "config.json").exists()]
    return sorted((RunFolder(storage, path.name) for path in paths), key=_changed, reverse=True)


def _changed(folder: RunFolder) -> float:
    """When something last happened: files that were fetched from an object store only tell when that was."""
    if folder.mirror is not None:
        with contextlib.suppress(RunFolderError):
            return max((float(event["time"]) for event in folder.read_events()), default=0.0)
    newest = 0.0
    for entry in folder.path.iterdir():
        with contextlib.suppress(OSError):  # a running run's temporary file
            newest = max(newest, entry.lstat().st_mtime)
    return newest


def _ago(folder: RunFolder) -> str:
    seconds = max(0.0, time.time() - _changed(folder))
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"
