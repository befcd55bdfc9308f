"""Sound: accumulation, clipping, a scheduler and mixed groups; for two workers under fsdp2."""

import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import keepstep


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.linear(self.norm(x)))


def main() -> None:
    run = keepstep.start()
    model = nn.Sequential(nn.Linear(8, 16), Block(), Block(), nn.Linear(16, 1))
    plain = [p for name, p in model.named_parameters() if name.endswith("bias") or "norm" in name]
    decayed = [p for p in model.parameters() if not any(p is q for q in plain)]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": plain, "lr": 5e-3}], lr=1e-2)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, [1e-2, 5e-3], total_steps=40)
    x = torch.randn(60, 8)
    train = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, shuffle=True)
    model, optimizer, scheduler, train = run.prepare(model, optimizer, scheduler, train)
    for _ in run.epochs(4):
        for batch in run.steps(train):
            for inputs, targets in run.micro(batch, 2):
                loss = nn.functional.mse_loss(model(inputs), targets)
                (loss / 2).backward()
                run.log(loss=loss)
            norm = run.clip_grad_norm(model, 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            run.log(norm=norm)
            time.sleep(0.02)


main()
