"""Defect: a NumPy generator without a seed, in the data."""

import time

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import keepstep


class Noisy(Dataset):
    def __init__(self) -> None:
        self.x = torch.randn(64, 8)
        self.generator = np.random.default_rng()  # DEFECT

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        noise = torch.from_numpy(self.generator.normal(size=8)).float()
        return self.x[index] + 0.1 * noise, self.x[index].sum(0, keepdim=True)


def main() -> None:
    run = keepstep.start()
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    train = DataLoader(Noisy(), batch_size=8, shuffle=True)
    model, optimizer, train = run.prepare(model, optimizer, train)
    began = time.time()  # innocent
    for _ in run.epochs(4):
        for inputs, targets in run.steps(train):
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss=loss)
            time.sleep(0.02)
    run.print(f"{time.time() - began:.1f} s")


main()
