"""Sound: a plain loop."""

import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import keepstep

run = keepstep.start()
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
x = torch.randn(64, 8)
train = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, shuffle=True)
model, optimizer, train = run.prepare(model, optimizer, train)
for _ in run.epochs(4):
    for inputs, targets in run.steps(train):
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.log(loss=loss)
        time.sleep(0.02)
