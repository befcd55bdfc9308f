"""Sound: two models and two optimizers."""

import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import keepstep


def main() -> None:
    run = keepstep.start()
    maker = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
    judge = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 1))
    make_step = torch.optim.Adam(maker.parameters(), lr=1e-3, betas=(0.5, 0.9))
    judge_step = torch.optim.Adam(judge.parameters(), lr=1e-3, betas=(0.5, 0.9))
    train = DataLoader(TensorDataset(torch.randn(64, 2) + 3), batch_size=8, shuffle=True)
    maker, judge, make_step, judge_step, train = run.prepare(maker, judge, make_step, judge_step, train)
    score = nn.functional.binary_cross_entropy_with_logits
    for _ in run.epochs(4):
        for (real,) in run.steps(train):
            ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
            fake = maker(torch.randn(len(real), 4))
            judged = score(judge(real), ones) + score(judge(fake.detach()), zeros)
            judge_step.zero_grad()
            judged.backward()
            judge_step.step()
            made = score(judge(fake), ones)
            make_step.zero_grad()
            made.backward()
            make_step.step()
            run.log(judged=judged, made=made)
            time.sleep(0.02)


main()
