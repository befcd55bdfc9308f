"""Defect: threads that add floats in the order in which they arrive."""

import threading
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import keepstep

_THREADS = 8


class Racing(torch.autograd.Function):
    """The sum of all numbers, each thread's added to the total as soon as it is there."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        total, lock, ready = torch.zeros(()), threading.Lock(), threading.Barrier(_THREADS)

        def add(part: torch.Tensor) -> None:
            ready.wait()
            with lock:
                total.add_(part.sum())

        threads = [threading.Thread(target=add, args=(part,)) for part in x.reshape(-1).chunk(_THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        ctx.shape = x.shape
        ctx.save_for_backward(total)
        return total.clone()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: torch.Tensor) -> torch.Tensor:
        (total,) = ctx.saved_tensors
        return (gradient * (1 + total)).expand(ctx.shape)


def main() -> None:
    run = keepstep.start()
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(64, 8) * torch.logspace(-3, 3, 64).unsqueeze(1) ** 0.3
    train = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16, shuffle=True)
    model, optimizer, train = run.prepare(model, optimizer, train)
    for _ in run.epochs(8):
        for inputs, targets in run.steps(train):
            loss = Racing.apply((model(inputs) - targets).square() / len(inputs))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss=loss)
            time.sleep(0.02)


main()
