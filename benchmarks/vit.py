"""Images a second of the ViT recipe: raw PyTorch beside keepstep with the same settings, alternating, in one run."""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from measure import Spread, compare, paired, print_table, timed, write_json
from torch.utils.data import DataLoader, Dataset

import keepstep
from keepstep import current

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes" / "vit_cifar10"))
from data import keep_batch, normalise
from model import ViT

BATCH = 512


class Images(Dataset):  # type: ignore[type-arg]
    """CIFAR-10's shape without its content: speed does not depend on what is in a picture."""

    def __init__(self, size: int) -> None:
        self.images = torch.randint(0, 256, (size, 3, 32, 32), dtype=torch.uint8)
        self.labels = torch.randint(0, 10, (size,))

    def __len__(self) -> int:
        return len(self.images)

    def __getitems__(self, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = torch.tensor(indices)
        return self.images[chosen], self.labels[chosen]


def make(small: bool) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    size = {"num_layers": 2, "num_heads": 4, "hidden": 64, "mlp": 128} if small else {}
    model = ViT(**size)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-2, fused=torch.cuda.is_available())


def loader(dataset: Images, batch: int) -> DataLoader[tuple[torch.Tensor, ...]]:
    options = {"shuffle": True, "drop_last": True, "collate_fn": keep_batch, "pin_memory": torch.cuda.is_available()}
    return DataLoader(dataset, batch_size=batch, **options)


def raw(dataset: Images, batch: int, device: torch.device, half: bool, compiled: bool, small: bool) -> Iterator[None]:
    """What a careful person writes by hand; one step each time it is advanced."""
    model, optimizer = make(small)
    model.to(device)
    forward = torch.compile(model) if compiled else model
    losses, wrote = [], time.perf_counter()
    for images, labels in itertools.chain.from_iterable(loader(dataset, batch) for _ in itertools.count()):
        images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=half):
            logits = forward(normalise(images))
        loss = F.cross_entropy(logits.float(), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if time.perf_counter() - wrote > 1:  # the losses reach the host once a second
            torch.stack(losses).tolist()
            losses, wrote = [], time.perf_counter()
        yield


def ours(dataset: Images, batch: int, storage: str, half: bool, compiled: bool, small: bool) -> Iterator[None]:
    """The same loop with keepstep, metrics logged at each step."""
    run = keepstep.start(
        name=f"vit-{half}-{compiled}", storage=storage, precision="bf16" if half else "fp32", compile=compiled
    )
    model, optimizer = make(small)
    model, optimizer, train = run.prepare(model, optimizer, loader(dataset, batch))
    for _ in run.epochs(10**9):
        for images, labels in run.steps(train):
            loss = F.cross_entropy(model(normalise(images)), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss=loss)
            yield


def measured(loop: Iterator[None], steps: int, device: torch.device) -> Callable[[], float]:
    """Seconds a step, over the next `steps` of a loop."""
    return lambda: timed(lambda: list(islice(loop, steps)), device) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="a tiny ViT, to try the script on a CPU")
    parser.add_argument("--only", choices=("eager fp32", "eager bf16", "compiled bf16"), help="measure this one alone")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=20, help="in a block")
    parser.add_argument("--output", help="write JSON to this file")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    batch = 32 if arguments.small else BATCH
    dataset = Images(batch * 50)
    rows = []
    settings = [("eager bf16", True, False), ("compiled bf16", True, True)]
    if not arguments.small:
        settings.insert(0, ("eager fp32", False, False))
    for name, half, compiled in (s for s in settings if arguments.only in (None, s[0])):
        with tempfile.TemporaryDirectory() as storage:
            loops = (
                raw(dataset, batch, device, half, compiled, arguments.small),
                ours(dataset, batch, storage, half, compiled, arguments.small),
            )
            baseline, contender = (measured(loop, arguments.steps, device) for loop in loops)
            baseline(), contender()  # compiles, warms up
            found = paired(baseline, contender, arguments.pairs)
            row = compare(name, ("raw PyTorch", "keepstep"), found, 1.01)
            row.notes["raw images/s"] = f"{Spread.of([batch / a for a, _ in found]).median:,.0f}"
            row.notes["keepstep images/s"] = f"{Spread.of([batch / b for _, b in found]).median:,.0f}"
            rows.append(row)
            current.abandon()  # the run has no end of its own
    print_table(rows)
    if arguments.output:
        write_json(Path(arguments.output), rows, vars(arguments))


if __name__ == "__main__":
    main()
