"""Trains a model whose embedding is its head, and leaves the weights as an artifact, too."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import keepstep


class Tied(nn.Module):
    """One weight under two names, as language models have it, and sizes that two workers cannot divide evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 6)
        self.body = nn.Linear(6, 6)
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(self.embedding(x) * self.scale)))


def train() -> None:
    run = keepstep.start(seed=1)
    model = Tied()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    words = torch.randint(0, 13, (32,), generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(words, (words + 1) % 13), batch_size=8)
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    for _ in run.epochs(2):
        for x, y in run.steps(loader):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss=loss)
    run.save("weights.safetensors", model.state_dict())


if __name__ == "__main__":
    train()
