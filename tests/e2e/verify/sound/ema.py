"""Sound: a moving average of the weights that takes part in the loss, and is tracked."""

import copy
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import keepstep


def main() -> None:
    run = keepstep.start()
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    x = torch.randn(64, 8)
    train = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, shuffle=True)
    model, optimizer, train = run.prepare(model, optimizer, train)
    average = run.track("average", copy.deepcopy(model))
    for _ in run.epochs(4):
        for inputs, targets in run.steps(train):
            pull = (model(inputs) - average(inputs).detach()).square().mean()
            loss = nn.functional.mse_loss(model(inputs), targets) + 0.1 * pull
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
                    slow.lerp_(fast, 0.1)
            run.log(loss=loss)
            time.sleep(0.02)


main()
