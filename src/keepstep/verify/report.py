"""What `keepstep verify` prints: a short table, and the verdict in words."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from keepstep.verify.plan import WORDS

if TYPE_CHECKING:
    from keepstep.verify.certificate import Certificate
    from keepstep.verify.launch import Command

_TAIL_LINES = 20


def say(text: str) -> None:
    print(f"keepstep: {text}", flush=True)


def tail_of(command: Command) -> str:
    """The end of what a run printed."""
    try:
        lines = command.log.read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return "nothing"
    return "\n".join(lines[-_TAIL_LINES:])


def print_certificate(certificate: Certificate, files: list[Path]) -> None:
    console = Console(markup=False, emoji=False, highlight=False)
    table = Table("fault", "rank", "step", "phase", "steps lost", "recovered in", box=None, pad_edge=False)
    for injected in certificate.injected:
        ranks = ", ".join(map(str, injected.fault.ranks)) or "all"
        seconds = "?" if injected.recovered_s is None else f"{injected.recovered_s:.1f} s"
        lost = "?" if injected.steps_lost is None else str(injected.steps_lost)
        table.add_row(WORDS[injected.fault.kind], ranks, str(injected.at_step), injected.phase, lost, seconds)
    console.print(table)
    for name, found in certificate.comparisons.items():
        first = found.first
        result = "bitwise equal" if first is None else f"differs, first in {first.words}"
        say(f"{name}: {found.steps} steps, {found.replayed} of them made again, {found.values:,} values: {result}")
    if (resized := certificate.resized) is not None:
        samples = "the same samples" if resized.same_samples else f"other samples at step {resized.first_other_sample}"
        split = f" ({resized.depends_on_split})" if resized.depends_on_split else ""
        say(
            f"resized: {resized.workers_before} → {resized.workers} worker(s) at step {resized.at_step}: {samples}, "
            f"metrics within {resized.largest:.1e}{split}"
        )
    elif certificate.resize_skipped:
        say(f"another number of workers was not tried: {certificate.resize_skipped}")
    for note in certificate.notes:
        say(f"note: {note}")
    say(certificate.verdict)
    if certificate.cause is not None:
        say(f"likely cause: {certificate.cause.words}")
    say(f"{' and '.join(path.name for path in files)} in {files[0].parent}")
