"""A training script with what users do beside the plain loop, to hold ZeRO against DDP."""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import keepstep

parser = argparse.ArgumentParser()
parser.add_argument("--optimizer", default="AdamW")
parser.add_argument("--clip", type=float)
parser.add_argument("--by-hand", type=int, default=1, help="backward passes that add up before a step")
parser.add_argument("--frozen", action="store_true", help="a layer that is not trained")
parser.add_argument("--tied", action="store_true", help="two layers that share a weight")
parser.add_argument("--buffer", action="store_true", help="a floating-point buffer, added before a LayerNorm")
parser.add_argument("--discard", action="store_true", help="gradients made, and thrown away")
parser.add_argument("--two-models", action="store_true")
parser.add_argument("--width", type=int, default=8)
parser.add_argument("--die-at", type=int)
parser.add_argument("--closure", action="store_true")
args = parser.parse_args()


class Positions(nn.Module):
    """What a transformer adds to its input, and does not train."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("table", torch.linspace(-1, 1, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table


run = keepstep.start()
torch.manual_seed(0)
wide = args.width
model = nn.Sequential(
    nn.Linear(8, wide),
    nn.GELU(),
    nn.LayerNorm(wide),
    nn.Linear(wide, wide),
    nn.GELU(),
    nn.Linear(wide, wide),
    nn.Linear(wide, 3),
)
if args.buffer:
    model.insert(2, Positions(wide))
if args.frozen:
    model[0].requires_grad_(False)
if args.tied:
    model[3].weight = model[0].weight
trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
optimizer = getattr(torch.optim, args.optimizer)(trained, lr=1e-2)
generator = torch.Generator().manual_seed(1)
data = TensorDataset(torch.randn(50, 8, generator=generator), torch.randint(0, 3, (50,), generator=generator))
model, optimizer, train = run.prepare(model, optimizer, DataLoader(data, 16, shuffle=True))
if args.two_models:
    other = nn.Linear(8, 8)
    run.prepare(other, torch.optim.SGD(other.parameters(), lr=0.1))
for _ in run.epochs(2):
    for x, y in run.steps(train):
        if run.step == args.die_at:
            raise SystemExit("as asked")
        if args.discard:
            F.cross_entropy(model(-x), y).backward()
            optimizer.zero_grad()
        for _ in range(args.by_hand):
            loss = F.cross_entropy(model(x), y) / args.by_hand
            loss.backward()
        if args.clip:
            run.log(norm=run.clip_grad_norm(model, args.clip))
        optimizer.step(*([float] if args.closure else []))
        optimizer.zero_grad()
        run.log(loss=loss)
