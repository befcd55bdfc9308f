"""Tells right answers to this lesson's exercises from wrong ones."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from common.checks import expect, expect_close


def check_1(answer: ModuleType) -> None:
    for num_weights, num_workers in ((9, 3), (8, 2), (10, 4)):
        generator = torch.Generator().manual_seed(num_weights)
        weights = torch.randn(num_weights, generator=generator, dtype=torch.float64)
        samples = torch.randn(num_workers, num_weights, generator=generator, dtype=torch.float64)

        def gradient(w: Tensor, rank: int, samples: Tensor = samples, num_weights: int = num_weights) -> Tensor:
            expect(len(w) == num_weights, f"gradient(...) got {len(w)} weights, the model has {num_weights}")
            return (w @ samples[rank]) * samples[rank]

        size = -(-num_weights // num_workers)
        filled = torch.nn.functional.pad(weights, [0, size * num_workers - num_weights])
        shards = [part.clone() for part in filled.split(size)]
        found = answer.fsdp_step(shards, num_weights, gradient, 0.1)
        what = f"{num_weights} weights on {num_workers} workers"
        expect(
            isinstance(found, list) and len(found) == num_workers, f"{what}: a list of {num_workers} shards is expected"
        )
        expect(
            [tuple(part.shape) for part in found] == [(size,)] * num_workers,
            f"{what}: every shard keeps its size, {size}",
        )
        gradients = torch.stack([gradient(weights, rank) for rank in range(num_workers)])
        new = torch.cat(found)
        if torch.allclose(new[:num_weights], weights - 0.1 * gradients.sum(0)):
            expect(False, f"{what}: the gradients were added up; the mean over the workers is wanted")
        own = torch.cat([gradients[rank, rank * size : (rank + 1) * size] for rank in range(num_workers)])
        if torch.allclose(new[:num_weights], weights - 0.1 * own[:num_weights]):
            expect(
                False,
                f"{what}: each worker used its own gradient only; reduce-scatter gives it the mean of all workers'",
            )
        right = torch.allclose(new[:num_weights], weights - 0.1 * gradients.mean(0))
        expect(right, f"{what}: the new weights are not those of DDP")
        expect(not new[num_weights:].any(), f"{what}: what fills up the last shards was zero, and is not any more")


def check_2(answer: ModuleType) -> None:
    # parameters, GPUs, strategy, mixed, bytes
    cases = [
        (10**9, 1, "ddp", False, 16e9),
        (10**9, 4, "ddp", False, 16e9),
        (10**9, 4, "zero1", False, 10e9),
        (10**9, 4, "zero2", False, 7e9),
        (10**9, 4, "zero3", False, 4e9),
        (10**9, 1, "zero3", False, 16e9),
        (10**9, 4, "ddp", True, 16e9),
        (10**9, 4, "zero1", True, 7e9),
        (10**9, 4, "zero2", True, 5.5e9),
        (10**9, 4, "zero3", True, 4e9),
        (7 * 10**9, 64, "zero2", True, 7 * (2 + 14 / 64) * 1e9),
    ]
    for parameters, gpus, strategy, mixed, expected in cases:
        what = f"bytes_per_gpu({parameters:.0e}, {gpus}, {strategy!r}, mixed={mixed})"
        expect_close(answer.bytes_per_gpu(parameters, gpus, strategy, mixed), expected, what)
    needed = [
        (10**9, 16e9, "ddp", False, 1),
        (10**9, 15.9e9, "ddp", False, None),
        (10**9, 4e9, "zero3", False, 4),
        (10**9, 3.9e9, "zero3", False, 5),
        (10**9, 8e9, "zero1", False, None),
        (10**9, 9e9, "zero1", False, 8),
        (7 * 10**9, 24e9, "zero2", True, 10),
    ]
    for parameters, room, strategy, mixed, expected in needed:
        what = f"gpus_needed({parameters:.0e}, {room:g}, {strategy!r}, mixed={mixed})"
        found = answer.gpus_needed(parameters, room, strategy, mixed)
        expect(found == expected, f"{what}: {found} is not right")


def check_3(answer: ModuleType) -> None:
    def files(folder: Path, epoch: int, ranks: range) -> None:
        (folder / f"epoch_{epoch}").mkdir()
        for rank in ranks:
            (folder / f"epoch_{epoch}" / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").touch()

    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        for epoch in (1, 2, 9, 10):
            files(folder, epoch, range(2))
        (folder / "latest").write_text("epoch_10")
        found = answer.newest_checkpoint(folder, 2)
        expect(found == "epoch_10", f"of epoch_1, 2, 9 and 10 it takes {found!r}: compare numbers, not text")
        files(folder, 11, range(1))
        found = answer.newest_checkpoint(folder, 2)
        expect(found == "epoch_10", f"epoch_11 lacks rank 1's file, epoch_10 is whole, and it takes {found!r}")
        found = answer.newest_checkpoint(folder, 3)
        expect(found is None, f"no checkpoint has files of 3 workers, and it takes {found!r} for 3 workers")
