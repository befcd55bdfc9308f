"""What a step of the whole ViT holds on each worker, under the strategy that `keepstep run --strategy` names."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

import keepstep

sys.path.insert(0, str(Path(__file__).absolute().parents[1]))
from common import memory
from common.tasks import TASKS


def main() -> None:
    run = keepstep.start(device="cpu")

    def prepare() -> Callable[[], None]:
        model = TASKS["vit"].model(small=False)
        optimizer = TASKS["vit"].make_optimizer(model, lr=None)
        wrapped, wrapped_optimizer = run.prepare(model, optimizer)
        images, labels = torch.randn(4, 3, 32, 32), torch.arange(4)

        def step() -> None:
            F.cross_entropy(wrapped(images), labels).backward()
            wrapped_optimizer.step()
            wrapped_optimizer.zero_grad()

        return step

    measured = memory.of_step(prepare, run.device)
    parameters = sum(parameter.numel() for parameter in TASKS["vit"].model(small=False).parameters())
    for held in run.gather(torch.tensor([float(measured.before), float(measured.peak)])).view(-1, 2).tolist():
        run.print(json.dumps({"parameters": parameters, "between_steps": held[0], "peak": held[1]}))


if __name__ == "__main__":
    main()
