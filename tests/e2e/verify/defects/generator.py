"""Defect: a generator of the script's own, seeded but not tracked."""

import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import keepstep


def main() -> None:
    run = keepstep.start()
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    x = torch.randn(64, 8)
    train = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, shuffle=True)
    model, optimizer, train = run.prepare(model, optimizer, train)
    noise = torch.Generator().manual_seed(7)  # DEFECT
    for _ in run.epochs(4):
        for inputs, targets in run.steps(train):
            disturbed = inputs + 0.1 * torch.randn(inputs.shape, generator=noise)
            loss = nn.functional.mse_loss(model(disturbed), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss=loss)
            time.sleep(0.02)


main()
