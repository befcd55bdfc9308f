"""`keepstep tune`, from its options to its exit code."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from keepstep.errors import EXIT_FAILED, EXIT_STOPPED, ConfigError, RunFolderError
from keepstep.folder import RunFolder
from keepstep.job import Target, script_name, stamped
from keepstep.storage import Storage
from keepstep.tune.journal import Journal, Record, follow
from keepstep.tune.plot import write_plot
from keepstep.tune.report import best_of, print_table, write_summary
from keepstep.tune.reservation import as_one_worker, check_gpus_per_worker
from keepstep.tune.search import Options, Search

SUMMARY, JOURNAL, PLOT = "tune.json", "results.jsonl", "tune.png"


def tune(settings: dict[str, Any], target: Target, options: Options) -> int:
    """Searches, prints what was found, and returns the exit code."""
    target.check()
    if options.resume and "name" not in settings:
        raise ConfigError("--resume needs --name, the name of the search to go on with")
    name = settings.get("name") or stamped(script_name(target.what), time.time())
    search = Search.of(settings, target, options, name)
    check_gpus_per_worker(search.launch)
    folder = RunFolder(search.storage, search.name)
    _check_begun(folder, search, options.resume)
    folder.create()
    folder.hold()
    with contextlib.suppress(OSError):
        folder.logs.rmdir()  # a run's; a search has none
    try:
        return _run(search, folder)
    finally:
        folder.release()


def _check_begun(folder: RunFolder, search: Search, resume: bool) -> None:
    """Raises unless the search is new, or to be resumed and the same."""
    if (folder.path / "config.json").exists():
        raise RunFolderError(f"{folder.path} is a run, not a search; give another --name")
    summary = folder.path / SUMMARY
    runs = [RunFolder(search.storage, search.run_name(number)) for number in range(search.trials)]
    taken = [run.name for run in runs if run.path.exists()]
    if not summary.exists():
        if resume:
            raise RunFolderError(f"there is no search {search.name!r} in {search.storage}; leave --resume out")
        if taken:
            raise RunFolderError(f"there is a run {taken[0]!r} in {search.storage} already; give another --name")
        return
    if not taken and not (folder.path / JOURNAL).exists():
        return  # it came to nothing, as one that the cluster has no room for
    if not resume:
        raise RunFolderError(
            f"search {search.name!r} is there already, in {folder.path}; --resume goes on with it, another --name "
            "begins a new one"
        )
    try:
        begun = json.loads(summary.read_text())["search"]
    except (ValueError, KeyError, TypeError) as error:
        raise RunFolderError(f"{summary} cannot be read ({error!r}); give another --name") from None
    asked = json.loads(json.dumps(search.described()))
    for part, value in asked.items():
        if begun.get(part) != value:
            raise ConfigError(
                f"search {search.name!r} was begun with {part} {json.dumps(begun.get(part))}, and now has "
                f"{json.dumps(value)}; give it as it was (only --trials may change), or another --name"
            )


def _run(search: Search, folder: RunFolder) -> int:
    journal = Journal(folder.path / JOURNAL)
    records = {number: Record(number, search.values(number)) for number in range(search.trials)}
    follow(records, journal.entries(), journal.path)
    summarise = partial(write_summary, folder.path / SUMMARY, search, records)
    summarise()
    stopped = False
    try:
        if not all(record.is_over for record in records.values()):
            stopped = _drive(search, records, journal, folder, summarise)
    finally:
        summarise()
    _conclude(search, records, folder)
    if stopped:
        print("keepstep: stopped on request, all trials are saved; the same command with --resume goes on")
        return EXIT_STOPPED
    return EXIT_FAILED if best_of(search, records.values()) is None else 0


def _drive(
    search: Search, records: dict[int, Record], journal: Journal, folder: RunFolder, summarise: Callable[[], None]
) -> bool:
    """Returns whether it was asked to stop."""
    from keepstep.engines.ray_cluster import Cluster
    from keepstep.tune.driver import Driver

    is_url = Storage.parse(search.storage).url is not None
    with Cluster(as_one_worker(search.launch, False), search.device, None if is_url else folder.path.parent) as cluster:
        cluster.check_nodes(folder)
        driver = Driver(search, records, journal, summarise)
        driver.run(cluster, folder.storage)
        return driver.stopped


def _conclude(search: Search, records: dict[int, Record], folder: RunFolder) -> None:
    print_table(search, records)
    files = [SUMMARY]
    if write_plot(folder.path / PLOT, search, records.values()):
        files.append(PLOT)
    else:
        print("keepstep: no plot was drawn: pip install matplotlib")
    print(f"keepstep: {' and '.join(files)} in {folder.path}")
    best = best_of(search, records.values())
    if best is None:
        first = RunFolder(search.storage, search.run_name(0))
        logged = sorted({name for line in first.read_metrics() for name in line} - {"step", "epoch"})
        print(
            f"keepstep: no trial has logged {search.metric}; {first.name} has logged "
            f"{', '.join(logged) or 'nothing'}, and printed what is in {first.logs / 'trial.txt'}"
        )
    else:
        print(f"keepstep: the best again: {search.best_command(best.values)}")
