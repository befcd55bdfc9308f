"""Takes a written checkpoint to the object store: every worker its own file, then rank 0 what makes it count."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from keepstep.checkpoint.mirror import Mirror
from keepstep.checkpoint.store import Store
from keepstep.errors import CheckpointError

_RANK_FILES = "rank_"


def upload(store: Store, mirror: Mirror, step: int, written: Path, rank: int, group: dist.ProcessGroup | None) -> None:
    """Collective over `group`. `written`: the folder that this machine's workers wrote into."""
    final = store.path(step)
    # Where rank 0 is, the folder has its final name by now; other machines have no use for theirs after this.
    here = written if written.exists() else final
    own = f"{_RANK_FILES}{rank:05d}.safetensors"
    _together(lambda: mirror.check_held() if rank == 0 else None, step, group)  # before anything is overwritten
    _together(lambda: mirror.upload(final.name, here / own), step, group)
    _together(lambda: _commit(store, mirror, step) if rank == 0 else None, step, group)
    shutil.rmtree(written, ignore_errors=True)


def _commit(store: Store, mirror: Mirror, step: int) -> None:
    final, best = store.path(step), store.best()
    for name in store.read_manifest(step).files:
        if not name.startswith(_RANK_FILES):
            mirror.upload(final.name, final / name)
    mirror.commit(final, store.keep, best["step"] if best else None)


def _together(part: Callable[[], None], step: int, group: dist.ProcessGroup | None) -> None:
    """Does this worker's part; raises on every worker if it failed on one, so that nobody waits for the failed."""
    problem = None
    try:
        part()
    except Exception as error:
        problem = str(error) or repr(error)
    problems: list[Any] = [problem]
    if group is not None:
        problems = [None] * dist.get_world_size(group)
        dist.all_gather_object(problems, problem, group=group)
    first = next((found for found in problems if found), None)
    if first is not None:
        raise CheckpointError(
            f"the checkpoint of step {step} could not be uploaded: {first}; "
            "what was written on this machine is kept: the same command goes on from it, and uploads it"
        )
