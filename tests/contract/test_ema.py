"""The average of the weights that docs/strategies.md shows, as it stands there, under every kind of sharding."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from contract.jobs import Done
from keepstep.engines import Outcome
from keepstep.folder import RunFolder
from keepstep.job import Target
from keepstep.supervisor import supervise

_DOCS = Path(__file__).parents[2] / "docs" / "strategies.md"
_BEFORE = """
import copy, torch, keepstep
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
run = keepstep.start()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
train = DataLoader(TensorDataset(torch.randn(48, 8)), 16, shuffle=True)
"""
_AFTER = """
for _ in run.epochs(2):
    for (x,) in run.steps(train):
        loss = model(x).pow(2).mean()
        loss.backward(); optimizer.step(); optimizer.zero_grad()
        update(0.9)
        run.log(loss=loss, ema=sum(weight.double().abs().sum() for weight in ema.parameters()))
        if run.step == 4 and not (mark := run.path / "died").exists():
            mark.touch()
            raise SystemExit("as asked")
"""


@pytest.mark.parametrize("sharded", ["fsdp2", pytest.param("zero3", marks=pytest.mark.slow)])
def test_the_average_of_the_docs(tmp_path: Path, sharded: str) -> None:
    found = re.search(r"## An average of the weights.*?```python\n(.*?)```", _DOCS.read_text(), re.DOTALL)
    assert found is not None
    script = tmp_path / "train.py"
    script.write_text(_BEFORE + found[1] + _AFTER)
    averages = {}
    for strategy in ("ddp", sharded):
        settings = {"name": strategy, "storage": str(tmp_path), "strategy": strategy, "workers": 2, "device": "cpu"}
        done = supervise({**settings, "checkpoint_every": "3", "checkpoint_mode": "sync"}, Target(str(script)))
        assert done.outcome is Outcome.FINISHED
        averages[strategy] = [line["ema"] for line in Done(RunFolder(tmp_path, strategy)).metrics]
    assert len(set(averages["ddp"])) == 6
    assert averages[sharded] == pytest.approx(averages["ddp"], rel=1e-6)
