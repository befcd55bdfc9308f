"""`keepstep checkpoints`: which ones a run has, what else lies beside them, and whether they are whole."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from keepstep.checkpoint.store import BEST, WRITING, Manifest, Store, step_of
from keepstep.errors import EXIT_FAILED, CheckpointError
from keepstep.folder import RunFolder
from keepstep.observe.console import format_metrics
from keepstep.show import existing_run


@dataclass(frozen=True)
class Row:
    """A line of the list, in the words that are shown."""

    checkpoint: str
    epoch: str = ""
    saved: str = ""
    size: str = ""
    by: str = ""
    metrics: str = ""
    notes: str = ""
    bad: bool = False


def print_checkpoints(storage: str | Path, name: str, verify: bool = False) -> int:
    """The exit code is 1 if a checkpoint was found to be bad; what was set aside as damaged before does not count."""
    folder = existing_run(storage, name)
    rows = [*_checkpoints(folder.store_to_read(), verify), *_others(folder)]
    if not rows:
        print(f"run '{name}' has no checkpoint yet")
        return 0
    console = Console(markup=False, emoji=False, highlight=False)
    if console.is_terminal:
        _print_table(console, rows)
    else:
        for row in rows:
            print(_line(row))
    return EXIT_FAILED if any(row.bad for row in rows) else 0


def size_text(num_bytes: int) -> str:
    size, unit = float(num_bytes), "B"
    for larger in ("KB", "MB", "GB", "TB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def _checkpoints(store: Store, verify: bool) -> Iterator[Row]:
    best = store.best()
    steps = store.steps()
    for step in steps:
        marks = ["newest"] if step == steps[-1] else []
        if best and best["step"] == step:
            marks.append(f"best {_printable(best['metric'])} {best['value']:.4g}")
        is_here = store.path(step).exists()
        try:
            if verify:
                _verify(store, step)
                marks.append("good")
            elif not is_here:
                yield Row(f"step {step}", notes=", ".join([*marks, "in the object store only; --verify fetches it"]))
                continue
            yield _row(store.read_manifest(step), size_text(_bytes_in(store.path(step))), ", ".join(marks))
        except (CheckpointError, OSError) as error:
            if store.path(step).exists() or not is_here:  # or a run that goes on has deleted it since it was listed
                size = size_text(_bytes_in(store.path(step)))
                yield Row(f"step {step}", size=size, notes=", ".join([*marks, f"BAD: {error}"]), bad=True)


def _row(manifest: Manifest, size: str, notes: str) -> Row:
    saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.created))
    workers = f"{manifest.strategy}, {manifest.world_size} worker{'s' if manifest.world_size > 1 else ''}"
    metrics = format_metrics({_printable(name): value for name, value in manifest.metrics.items()})
    return Row(f"step {manifest.step}", f"epoch {manifest.epoch}", saved, size, workers, metrics, notes)


def _verify(store: Store, step: int) -> None:
    from keepstep.checkpoint.contents import check_contents  # it imports DCP, which takes half a second

    store.check(step)
    check_contents(store, step)


def _others(folder: RunFolder) -> Iterator[Row]:
    """What is in the folder and is no checkpoint."""
    if not folder.checkpoints.is_dir():
        return
    running = folder.is_held()
    for path in sorted(folder.checkpoints.iterdir()):
        if path.name.startswith("damaged-"):
            note = "set aside, for it could not be read; delete it when you know why"
        elif path.name.startswith(WRITING):
            note = "being written" if running else "left by an interrupted save; the next start deletes it"
        elif path.name == BEST or step_of(path.name) is not None:
            continue
        else:
            note = "not keepstep's"
        yield Row(_printable(path.name), size=size_text(_bytes_in(path)), notes=note)


def _print_table(console: Console, rows: list[Row]) -> None:
    table = Table("checkpoint", "epoch", "saved", "size", "by", "metrics", "", box=None, pad_edge=False)
    for row in rows:
        epoch = row.epoch.removeprefix("epoch ")
        style = "red" if row.bad else None
        table.add_row(row.checkpoint, epoch, row.saved, row.size, row.by, row.metrics, row.notes, style=style)
    console.print(table)


def _line(row: Row) -> str:
    fields = (row.checkpoint, row.epoch, row.saved, row.size, row.by, row.metrics, row.notes)
    return "  ".join(field for field in fields if field)


def _bytes_in(path: Path) -> int:
    """Of the files in a folder, or of a file; without following links."""
    try:
        if path.is_symlink() or not path.is_dir():
            return path.lstat().st_size
        return sum(entry.lstat().st_size for entry in path.iterdir())
    except OSError:  # it was deleted just now
        return 0


def _printable(text: str) -> str:
    """A name from a file, for a terminal: control characters could rewrite what stands on it."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
