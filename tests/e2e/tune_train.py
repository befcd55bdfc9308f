"""A small regression: the larger --lr (up to 0.1), the better. For searches that must end in seconds."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import keepstep

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--pause", type=float, default=0.0, help="seconds a step")
parser.add_argument("--broken", action="store_true")
parser.add_argument("--hold", type=Path, help="a good --lr waits for this file after step 20")
args = parser.parse_args()

run = keepstep.start()
source = torch.Generator().manual_seed(0)
inputs = torch.randn(32, 4, generator=source)
data = TensorDataset(inputs, inputs @ torch.tensor([[1.0], [-2.0], [3.0], [0.5]]))
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
model, optimizer, train, test = run.prepare(
    model, optimizer, DataLoader(data, batch_size=8, shuffle=True), DataLoader(data, batch_size=32)
)
for _ in run.epochs(args.epochs):
    for x, y in run.steps(train):
        if args.broken and run.step == 3:
            raise RuntimeError("broken as asked")
        while args.hold and args.lr > 1e-3 and run.step == 20 and not args.hold.exists():
            time.sleep(0.05)
        loss = mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.log(loss=loss)
        time.sleep(args.pause)
    with torch.no_grad():
        run.log(error=sum(mse_loss(model(x), y) for x, y in test))
