"""`keepstep checkpoints`: which ones a run has, what else lies beside them, and whether they are whole."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from keepstep.checkpoint.store import BEST, WRITING, Manifest, Store, step_of
from keepstep.errors import EXIT_FAILED, CheckpointError
from keepstep.folder import RunFolder
from keepstep.observe.console import format_metrics, printable
from keepstep.show import existing_run

_HERE = "on this machine"


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


@dataclass(frozen=True)
class Copy:
    """One of the places where a checkpoint lies, and what is wrong with it there."""

    where: str
    manifest: Manifest | None = None
    problem: str | None = None

    @property
    def verdict(self) -> str:
        if self.problem is not None:
            return f"BAD {self.where}: {self.problem}"
        return "this machine's copy is good" if self.where == _HERE else f"the copy {self.where} is good"


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
            marks.append(f"best {printable(best['metric'])} {best['value']:.4g}")
        row = _verified(store, step, marks) if verify else _listed(store, step, marks)
        if row is not None:
            yield row


def _listed(store: Store, step: int, marks: list[str]) -> Row | None:
    """By its manifest on this machine alone."""
    if store.mirror is not None and not store.path(step).exists():
        size = size_text(store.mirror.bytes_of(step))
        return Row(f"step {step}", size=size, notes=", ".join([*marks, "in the object store only; --verify reads it"]))
    try:
        return _row(store.read_manifest(step), size_text(_bytes_in(store.path(step))), ", ".join(marks))
    except (CheckpointError, OSError) as error:
        return _bad(store, step, [*marks, f"BAD: {error}"])


def _verified(store: Store, step: int, marks: list[str]) -> Row | None:
    """By all of its bytes: those of the object store and those of this machine, each for itself."""
    copies = list(_copies(store, step))
    bad = [copy for copy in copies if copy.problem is not None]
    if bad:
        bad_first = sorted(copies, key=lambda copy: copy.problem is None)
        said = "; ".join(copy.verdict for copy in bad_first) if store.mirror is not None else f"BAD: {bad[0].problem}"
        return _bad(store, step, [*marks, said])
    for copy in copies:
        assert copy.manifest is not None
        size = sum(record.bytes for record in copy.manifest.files.values())
        return _row(copy.manifest, size_text(size), ", ".join([*marks, "good"]))
    return None  # a run that goes on has deleted it since it was listed


def _copies(store: Store, step: int) -> Iterator[Copy]:
    here, mirror = Store(store.root, keep=1), store.mirror
    if mirror is not None and step in mirror.steps():
        copy = _inspected(f"in {mirror.remote.url}", step, mirror.checked_copy(step))
        if copy.problem is None or step in mirror.steps():
            yield copy
    if here.path(step).exists():
        copy = _inspected(_HERE, step, _checked_here(here, step))
        if copy.problem is None or here.path(step).exists():
            yield copy


@contextmanager
def _checked_here(store: Store, step: int) -> Iterator[Store]:
    store.check(step)
    yield store


def _inspected(where: str, step: int, copy: AbstractContextManager[Store]) -> Copy:
    from keepstep.checkpoint.contents import check_contents  # it imports DCP, which takes half a second
    from keepstep.checkpoint.remote import MissingObject

    try:
        with copy as store:
            check_contents(store, step)
            return Copy(where, store.read_manifest(step))
    except (CheckpointError, MissingObject, OSError) as error:
        return Copy(where, problem=str(error))


def _bad(store: Store, step: int, notes: list[str]) -> Row | None:
    is_here = store.path(step).exists()
    if not is_here and (store.mirror is None or step not in store.mirror.steps()):
        return None  # a run that goes on has deleted it since it was listed
    size = _bytes_in(store.path(step)) if is_here or store.mirror is None else store.mirror.bytes_of(step)
    return Row(f"step {step}", size=size_text(size), notes=", ".join(notes), bad=True)


def _row(manifest: Manifest, size: str, notes: str) -> Row:
    saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.created))
    workers = f"{manifest.strategy}, {manifest.world_size} worker{'s' if manifest.world_size > 1 else ''}"
    metrics = format_metrics(manifest.metrics)
    return Row(f"step {manifest.step}", f"epoch {manifest.epoch}", saved, size, workers, metrics, notes)


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
        yield Row(printable(path.name), size=size_text(_bytes_in(path)), notes=note)


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
