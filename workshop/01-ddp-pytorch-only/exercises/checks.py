"""Checks the answers to lesson 01's exercises."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import torch
from torch import nn

from common.checks import Wrong, expect

SIZES = (3, 1)
WORKER = """
import sys, json, torch, torch.distributed as dist
from pathlib import Path
from exercise_checks import load, gradient_of, samples
answer, rank, folder = load(Path(sys.argv[1])), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
begin, end = [(0, 3), (3, 4)][rank]
x, y = samples()
torch.nn.functional.cross_entropy(model(x[begin:end]), y[begin:end]).backward()
answer.average_gradients(model, end - begin)
Path(folder, f"{rank}.json").write_text(json.dumps(gradient_of(model)))
dist.destroy_process_group()
"""


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(sum(SIZES), 4, generator=generator), torch.tensor([0, 1, 1, 0])


def gradient_of(model: nn.Module) -> list[float]:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).tolist()


def check_1(answer: ModuleType) -> None:
    """On two real processes, with three samples and one."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    x, y = samples()
    nn.functional.cross_entropy(model(x), y).backward()
    whole = torch.tensor(gradient_of(model))
    with tempfile.TemporaryDirectory() as folder:
        loader = Path(folder, "exercise_checks.py")
        paths = [str(Path(__file__).parents[2]), str(Path(__file__).parent)]
        loader.write_text(f"import sys\nsys.path[:0] = {paths!r}\n"
                          "from checks import gradient_of, samples\nfrom common.checks import load\n")  # fmt: skip
        words = [sys.executable, "-c", WORKER, answer.__file__]
        workers = [
            subprocess.Popen([*words, str(rank), folder], cwd=folder, stderr=subprocess.PIPE, text=True)
            for rank in range(2)
        ]
        try:
            errors = [worker.communicate(timeout=60)[1] for worker in workers]
        except subprocess.TimeoutExpired:
            raise Wrong("the workers wait for each other: all must make the same calls, in the same order") from None
        finally:
            for worker in workers:
                worker.kill()
        for worker, error in zip(workers, errors, strict=True):
            if "NotImplementedError" in error:
                raise NotImplementedError
            expect(worker.returncode == 0, f"a worker failed: {error.strip().splitlines()[-1:]}")
        found = [torch.tensor(json.loads(Path(folder, f"{rank}.json").read_text())) for rank in range(2)]
    expect(torch.allclose(found[0], found[1], atol=1e-6), "the two workers end up with different gradients")
    expect(
        torch.allclose(found[0], whole, atol=1e-6),
        "with 3 samples on one worker and 1 on the other, the gradient is not that of all 4 in one process: "
        f"it has the length {found[0].norm():.4f} instead of {whole.norm():.4f}; a sample must count for as much on "
        "either",
    )


def check_2(answer: ModuleType) -> None:
    for num_samples, world_size in ((10, 2), (10, 3), (7, 4), (2, 4), (0, 2), (10_000, 7)):
        shares = [list(answer.share(num_samples, rank, world_size)) for rank in range(world_size)]
        where = f"{num_samples} samples for {world_size} workers"
        numbers = sorted(number for each in shares for number in each)
        twice = len(numbers) - len(set(numbers))
        expect(twice == 0, f"{where}: {twice} are in two shares, and would be counted twice")
        expect(numbers == list(range(num_samples)), f"{where}: only {len(numbers)} are in a share, or others are")
        sizes = [len(each) for each in shares]
        expect(max(sizes) - min(sizes) <= 1, f"{where}: shares of {sizes}; some workers would wait for others")


def check_3(answer: ModuleType) -> None:
    num_samples, num_epochs, world_size = 40, 3, 2
    found = [answer.orders(num_samples, num_epochs, rank, world_size, 5) for rank in range(world_size)]
    expect(all(len(each) == num_epochs for each in found), f"a list for each of {num_epochs} epochs was expected")
    expect(found[0][0] != found[0][1], "the second epoch has the order of the first")
    expect(found[0][1] != found[0][2], "the third epoch has the order of the second")
    for epoch in range(num_epochs):
        seen = sorted(number for each in found for number in each[epoch])
        expect(seen == list(range(num_samples)), f"epoch {epoch}: the workers do not see each sample once between them")
    again = answer.orders(num_samples, num_epochs, 0, world_size, 5)
    expect(again == found[0], "the same seed gives another order the next time: a run could not be repeated")
    expect(answer.orders(num_samples, 1, 0, world_size, 6) != found[0][:1], "another seed gives the same order")
