"""Which DeepSpeed checkpoint should a run go on from? This answer is what many scripts have; it is wrong twice.

`folder` holds one folder a checkpoint, epoch_1, epoch_2, … A worker that dies while it saves leaves its file out: a
checkpoint counts only if zero_pp_rank_R_mp_rank_00_optim_states.pt is there for every rank R of `num_workers`.
Return the name of the newest that counts, or None.
"""

from __future__ import annotations

from pathlib import Path


def newest_checkpoint(folder: Path, num_workers: int) -> str | None:
    return sorted(path.name for path in folder.glob("epoch_*"))[-1]
