"""Sound: dropout, augmentation with all three global generators, two loader processes, and a speed that is logged."""

import random
import time

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import keepstep


class Noisy(Dataset):
    def __init__(self) -> None:
        self.x = torch.randn(64, 8)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        noise = torch.rand(()).item() + random.random() + float(np.random.rand())
        return self.x[index] + 0.1 * noise, self.x[index].sum(0, keepdim=True)


def main() -> None:
    run = keepstep.start()
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train = DataLoader(Noisy(), batch_size=8, shuffle=True, num_workers=2)
    model, optimizer, train = run.prepare(model, optimizer, train)
    began = time.time()
    for _ in run.epochs(4):
        for inputs, targets in run.steps(train):
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.02)
            run.log(loss=loss, steps_per_s=(run.step + 1) / (time.time() - began))


main()
