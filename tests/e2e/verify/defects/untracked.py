"""Defect: a curriculum that counts its steps in a variable of its own."""

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
    split = torch.Generator().manual_seed(1)  # innocent: it is not drawn from in the loop
    order = torch.randperm(8, generator=split)
    began = time.time()
    difficulty = 0.0  # DEFECT
    for _ in run.epochs(4):
        for inputs, targets in run.steps(train):
            loss = nn.functional.mse_loss(model(inputs[:, order] * min(1.0, difficulty)), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            difficulty += 0.01
            run.log(loss=loss)
            time.sleep(0.02)
    run.print(f"{time.time() - began:.1f} s")


main()
