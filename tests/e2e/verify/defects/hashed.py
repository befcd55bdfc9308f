"""Defect: weights that depend on the order of a set, which is another in every process."""

import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import keepstep

FEATURES = {"age", "height", "weight", "income", "children", "rooms", "floor", "distance"}


def main() -> None:
    run = keepstep.start()
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    x = torch.randn(64, 8)
    train = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, shuffle=True)
    model, optimizer, train = run.prepare(model, optimizer, train)
    for _ in run.epochs(4):
        for inputs, targets in run.steps(train):
            scale = torch.tensor([len(name) / 5 for name in FEATURES])  # DEFECT
            loss = nn.functional.mse_loss(model(inputs * scale), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss=loss)
            time.sleep(0.02)


main()
