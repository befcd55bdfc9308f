"""What is refused before anything is started, and what one worker's run says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from keepstep.engines import Outcome
from keepstep.errors import ConfigError
from keepstep.job import Target
from keepstep.supervisor import Result, supervise

SCRIPT = """
import torch, keepstep
from pathlib import Path
from torch.utils.data import DataLoader, TensorDataset
run = keepstep.start()
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(8, 4)), batch_size=2)
model, optimizer, loader = run.prepare(model, optimizer, loader)
for epoch in run.epochs(1):
    for (x,) in run.steps(loader):
        loss = model(x).pow(2).mean()
        loss.backward(); optimizer.step(); optimizer.zero_grad()
        run.log(loss=loss)
        {body}
    run.log(accuracy=0.5)
"""

Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """`run(body, name=..., ...)` runs a small script with that in its loop, in this process."""

    def start(body: str = "", **settings: Any) -> Result:
        script = tmp_path / "train.py"
        script.write_text(SCRIPT.format(body=body))
        chosen = {"name": "a", "storage": str(tmp_path / "runs"), "device": "cpu"}
        return supervise({**chosen, **settings}, Target(str(script)))

    return start


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"strategy": "zero2", "deepspeed_config": "no.json"}, "no.json cannot be read: No such file"),
        ({"strategy": "zero2", "deepspeed_config": {"zero_optimization": {"stage": 3}}}, "--strategy to 2"),
        ({"strategy": "zero3", "precision": "fp16"}, "--strategy zero3 --precision fp16 needs a GPU"),
        ({"strategy": "fsdp2", "cpu_offload": True}, "--cpu-offload moves state from the GPU to the host"),
        ({"device": "cuda"}, "torch sees no GPU here"),
        ({"sinks": "mlfow"}, "--sinks is 'mlfow'; choose among tensorboard, mlflow, wandb, prometheus"),
        ({"sinks": ""}, "--sinks is ''; choose among"),
        ({"device": "auto", "strategy": "fsdp2", "cpu_offload": True}, "this run is on the CPU already"),
    ],
    ids=str,
)
def test_what_can_be_known_is_said_before_anything_is_started(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], says: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if isinstance(settings.get("deepspeed_config"), dict):
        file = tmp_path / "ds.json"
        file.write_text(json.dumps(settings["deepspeed_config"]))
        settings = {**settings, "deepspeed_config": str(file)}
    with pytest.raises(ConfigError, match=says):
        run(**settings, nvme_offload=str(tmp_path / "disk") if settings.get("strategy") == "zero3" else None)
    assert not (tmp_path / "runs").exists() and not (tmp_path / "disk").exists()


def test_rays_workers_may_have_what_is_not_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="there is no script"):
        supervise({"engine": "ray", "strategy": "fsdp2", "cpu_offload": True}, Target(str(tmp_path / "no.py")))


def test_one_worker_says_how_it_ended_as_several_do(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    assert run().outcome is Outcome.FINISHED
    lines = capfd.readouterr().err.splitlines()
    assert len([line for line in lines if line.startswith("step 4/4")]) == 1
    (last,) = [line for line in lines if line.startswith("keepstep: finished at step 4  loss ")]
    assert last.endswith("accuracy 0.5") and lines.index(last) >= len(lines) - 2, (
        "only where the time went stands below"
    )


FAIL_ONCE = (
    "mark = Path(__file__).with_name('failed')\n        if run.step == {at} and not mark.exists(): mark.touch(); 1 / 0"
)


@pytest.mark.parametrize(("at", "what_now"), [(0, "starting again"), (2, "going on from the newest checkpoint")])
def test_where_a_run_goes_on_after_a_failure(
    run: Run, capfd: pytest.CaptureFixture[str], at: int, what_now: str
) -> None:
    done = run(FAIL_ONCE.format(at=at), checkpoint_every="1", checkpoint_mode="sync")
    assert done.outcome is Outcome.FINISHED
    assert f"keepstep: failure 1 of 3 forgiven; {what_now}" in capfd.readouterr().err
