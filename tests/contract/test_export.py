"""Whatever strategy wrote a checkpoint, its export is the bare model's weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from contract.jobs import Combination
from contract.tied import Tied
from keepstep.cli import main
from keepstep.engines import Outcome
from keepstep.job import Target
from keepstep.supervisor import supervise

_SCRIPT = Path(__file__).with_name("tied.py")
_ALONE = Combination("inprocess", "single", 1)
_STRATEGIES = [
    _ALONE,
    *(Combination("torchrun", strategy, 2) for strategy in ("ddp", "fsdp", "fsdp2", "zero2", "zero3")),
]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """What one process trains, without a strategy."""
    storage = tmp_path_factory.mktemp("alone")
    train(storage, _ALONE)
    return load_file(storage / "a" / "artifacts" / "weights.safetensors")


def train(storage: Path, combination: Combination) -> None:
    settings = {"engine": combination.engine, "strategy": combination.strategy, "workers": combination.workers}
    chosen = {**settings, "name": "a", "storage": str(storage), "device": "cpu"}
    if combination.strategy == "zero3":  # which leaves weights as small as these whole
        divide_all = storage / "ds.json"
        divide_all.write_text(json.dumps({"zero_optimization": {"stage3_param_persistence_threshold": 0}}))
        chosen["deepspeed_config"] = str(divide_all)
    assert supervise(chosen, Target(str(_SCRIPT), ())).outcome is Outcome.FINISHED


@pytest.mark.parametrize("combination", _STRATEGIES, ids=str)
def test_exports_load_strictly_into_the_bare_model(
    tmp_path: Path, combination: Combination, expected: dict[str, torch.Tensor], capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, combination)
    saved = load_file(tmp_path / "a" / "artifacts" / "weights.safetensors")
    torch.testing.assert_close(saved, expected, rtol=1e-5, atol=1e-5)

    def export(name: str, *flags: str) -> Path:
        assert main(["export", "a", "--storage", str(tmp_path), "--output", str(tmp_path / name), *flags]) == 0
        return tmp_path / name

    whole = load_file(export("whole.safetensors"))
    shards = load_shards(export("shards", "--shard-size", "0.4KB"))
    half = load_file(export("half.safetensors", "--dtype", "bf16"))
    assert all(torch.equal(shards[name], tensor) for name, tensor in whole.items())
    for weights, tolerance in ((whole, 1e-5), (shards, 1e-5), (half, 1e-2)):
        model = Tied()
        model.load_state_dict(weights, strict=True)
        assert model.head.weight is model.embedding.weight
        torch.testing.assert_close(dict(model.state_dict()), expected, rtol=tolerance, atol=tolerance)
    capsys.readouterr()
    assert main(["checkpoints", "a", "--storage", str(tmp_path), "--verify"]) == 0
    assert capsys.readouterr().out.endswith("newest, good\n")


def load_shards(folder: Path) -> dict[str, torch.Tensor]:
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(weight_map.values())) > 1
    return {name: load_file(folder / file)[name] for name, file in weight_map.items()}
