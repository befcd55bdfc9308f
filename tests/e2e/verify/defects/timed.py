"""Defect: samples that depend on the time of day."""

import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import keepstep


class Timed(Dataset):
    def __init__(self) -> None:
        self.x = torch.randn(64, 8)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        phase = time.time() % 1.0  # DEFECT
        return self.x[index] + 0.1 * phase, self.x[index].sum(0, keepdim=True)


def main() -> None:
    run = keepstep.start()
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    train = DataLoader(Timed(), batch_size=8, shuffle=True)
    model, optimizer, train = run.prepare(model, optimizer, train)
    began = time.perf_counter()  # innocent
    for _ in run.epochs(4):
        for inputs, targets in run.steps(train):
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss=loss)
            time.sleep(0.02)
    run.print(f"{time.perf_counter() - began:.1f} s")


main()
