"""The newest whole DeepSpeed checkpoint, by number."""

from __future__ import annotations

from pathlib import Path


def newest_checkpoint(folder: Path, num_workers: int) -> str | None:
    def is_whole(path: Path) -> bool:
        files = (path / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(num_workers))
        return all(file.is_file() for file in files)

    numbers = [int(path.name.removeprefix("epoch_")) for path in folder.glob("epoch_*") if is_whole(path)]
    return f"epoch_{max(numbers)}" if numbers else None
