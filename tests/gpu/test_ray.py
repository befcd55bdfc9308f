"""The engine ray, Ray Data, predict on CUDA. One GPU is enough."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from contract.jobs import Combination, Done, assert_same, command
from keepstep.folder import RunFolder

pytest.importorskip("ray", reason="needs Ray")
pytestmark = [pytest.mark.gpu, pytest.mark.ray, pytest.mark.filterwarnings("default")]


@pytest.mark.parametrize(("strategy", "precision"), [("ddp", "fp32"), ("fsdp2", "bf16"), ("zero3", "bf16")])
def test_bitwise_the_same_after_kills(tmp_path: Path, strategy: str, precision: str) -> None:
    flags = ("--device", "cuda", "--deterministic", "--precision", precision)
    kills = ["body:7:0", "save:10:0", "validation:16:0"]
    assert command(tmp_path, "calm", Combination("torchrun", strategy, 1), [], *flags) == 0
    on_ray = Combination("ray", strategy, 1)
    assert command(tmp_path, "killed", on_ray, ["--kill", *kills], *flags, "--max-failures", "9") == 0
    killed = Done(RunFolder(tmp_path, "killed"))
    assert len(list(killed.folder.path.glob("killed_*"))) == len(kills)
    assert_same(Done(RunFolder(tmp_path, "calm")), killed)


_RAY_DATA = """
import json, os, sys
import numpy as np, ray, torch
import keepstep

run = keepstep.start()
ds = ray.data.range(1000, override_num_blocks=8).map_batches(
    lambda b: {"id": b["id"], "x": b["id"][:, None] * np.ones((1, 64), np.float32)}
)
model = torch.nn.Linear(64, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
model, optimizer, train = run.prepare(model, optimizer, keepstep.RayData(ds, batch_size=50, shuffle=True))
seen = []
for epoch in run.epochs(2):
    for batch in run.steps(train):
        assert batch["x"].device == run.device and run.device.type == os.environ["WANTED"], batch["x"].device
        assert bool((batch["x"][:, 0] == batch["id"]).all())
        seen.append(batch["id"].tolist())
        model(batch["x"].float()).mean().backward()
        optimizer.step(); optimizer.zero_grad()
json.dump(seen, open(sys.argv[1], "w"))
"""


def test_ray_data_comes_to_the_gpu(tmp_path: Path, ray_address: str) -> None:
    """The rows that a run on the CPU gets, in the same order, on the device, and whole when they are used."""
    script = tmp_path / "train.py"
    script.write_text(_RAY_DATA)
    seen = []
    for device in ("cuda", "cpu"):
        found = tmp_path / f"{device}.json"
        words = [sys.executable, "-m", "keepstep", "run", "--device", device, "--name", device, str(script), str(found)]
        environment = {**os.environ, "WANTED": device, "RAY_ADDRESS": ray_address}
        subprocess.run(words, cwd=tmp_path, check=True, timeout=120, env=environment)
        seen.append(json.loads(found.read_text()))
    assert seen[0] == seen[1]
    assert sorted(row for batch in seen[0][:20] for row in batch) == list(range(1000))


_PREDICT = """
import numpy as np
import torch
import keepstep

def make_model():
    torch.manual_seed(0)
    return torch.nn.Linear(8, 3)

def predict(model, batch):
    weight = next(model.parameters())
    x = torch.from_numpy(batch["x"]).to(weight.device)
    return {"y": model(x).cpu().numpy(), "device": np.array([weight.device.type] * len(x))}

if __name__ == "__main__":
    run = keepstep.start()
    model = make_model()
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in run.steps(run.prepare(torch.utils.data.DataLoader(torch.zeros(4, 8), batch_size=4))):
        model(torch.ones(4, 8, device=run.device)).mean().backward()
        optimizer.step()
"""


def test_predict_uses_the_gpu_in_process_and_on_ray(tmp_path: Path, ray_address: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    (tmp_path / "model.py").write_text(_PREDICT)
    x = torch.randn(5000, 8, generator=torch.Generator().manual_seed(0)).numpy()
    column = pa.FixedSizeListArray.from_arrays(x.ravel(), 8)
    pq.write_table(pa.table({"id": np.arange(5000), "x": column}), tmp_path / "data.parquet", row_group_size=500)
    keepstep = [sys.executable, "-m", "keepstep"]
    subprocess.run([*keepstep, "run", "--name", "a", "model.py"], cwd=tmp_path, check=True, timeout=120)
    tables = []
    for output, flags in (("here", []), ("ray", ["--address", ray_address])):
        words = [*keepstep, "predict", "a", "--data", "data.parquet", "--output", output, "--with", "model.py", *flags]
        subprocess.run(words, cwd=tmp_path, check=True, timeout=120)
        tables.append(pq.read_table(tmp_path / output))
    assert tables[0]["device"].unique().to_pylist() == ["cuda"]
    assert tables[0]["id"].to_pylist() == list(range(5000))
    assert tables[0].equals(tables[1])
