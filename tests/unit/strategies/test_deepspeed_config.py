"""What DeepSpeed is told: by the flags, by the user's file, by the model's size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from keepstep.config import StrategyConfig
from keepstep.errors import ConfigError
from keepstep.strategies.deepspeed_config import deepspeed_config, keeping_gradients, refusal, sized_for


def of_file(folder: Path, settings: object, stage: int = 2, **flags: Any) -> dict[str, Any]:
    file = folder / "ds.json"
    file.write_text(json.dumps(settings))
    return deepspeed_config(StrategyConfig(strategy=f"zero{stage}", deepspeed_config=str(file), **flags), stage)


def test_the_file_adds_and_auto_leaves_it_to_the_flags(tmp_path: Path) -> None:
    theirs = {"zero_optimization": {"round_robin_gradients": True, "stage": "auto"}, "train_batch_size": "auto"}
    found = of_file(tmp_path, theirs, precision="bf16")
    assert found["zero_optimization"] == {"stage": 2, "round_robin_gradients": True}
    assert found["bf16"] == {"enabled": True}
    assert "train_batch_size" not in found


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"optimizer": {"type": "Adam"}}, "sets optimizer, but the script makes the optimizer"),
        ({"train_batch_size": 8}, "sets train_batch_size, but the batch is the DataLoader's batch_size"),
        ({"zero_optimization": {"stage": 3}}, "sets zero_optimization.stage to 3, --strategy to 2; change --strategy"),
        ({"bf16": {"enabled": True}}, "sets bf16.enabled to true, --precision to false"),
        ([1], "holds a list; DeepSpeed's settings are an object"),
        ({"zero_optimization": 5}, "sets zero_optimization to 5; an object is expected there"),
        ({"bf16": True}, "sets bf16 to true; an object is expected there"),
        ({"aio": "fast"}, 'sets aio to "fast"; an object is expected there'),
        ({"gradient_clipping": {"norm": 1}}, 'sets gradient_clipping to {"norm": 1}; no object is expected there'),
    ],
)
def test_what_conflicts_is_refused(tmp_path: Path, settings: object, says: str) -> None:
    with pytest.raises(ConfigError, match=says.replace(".", "[.]")):
        of_file(tmp_path, settings)


def test_a_file_that_is_not_there_or_not_json(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        deepspeed_config(StrategyConfig(strategy="zero1", deepspeed_config=str(tmp_path / "no.json")), 1)
    (tmp_path / "ds.json").write_text("{'stage': 1}")
    with pytest.raises(ConfigError, match="is not JSON"):
        deepspeed_config(StrategyConfig(strategy="zero1", deepspeed_config=str(tmp_path / "ds.json")), 1)


class Report(ValueError):
    """As pydantic has it."""

    def errors(self) -> list[dict[str, Any]]:
        return [{"loc": ("offload_optimizer", "device"), "input": "moon", "msg": "Input should be 'cpu' or 'nvme'"}]


def test_deepspeeds_own_refusal_is_one_line_that_names_the_key() -> None:
    start = "DeepSpeed refuses the settings of --deepspeed-config: "
    assert str(refusal(Report("many\nlines"))) == (
        start + "offload_optimizer.device is \"moon\": Input should be 'cpu' or 'nvme'"
    )
    assert str(refusal(ValueError("Invalid\n  type"))) == start + "Invalid type"


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False, device="meta")


@pytest.mark.parametrize(("width", "bucket"), [(8, 1 << 23), (4096, 4096**2), (1 << 15, 500_000_000)])
def test_it_gathers_about_a_block_at_a_time(width: int, bucket: int) -> None:
    model = nn.Sequential(Block(width), Block(width), nn.Linear(width, 9 * width, device="meta"))
    zero = {"stage": 3, "stage3_max_live_parameters": 7}
    found = sized_for({"zero_optimization": zero}, model)["zero_optimization"]
    assert found == {
        "stage": 3,
        "reduce_bucket_size": bucket,
        "stage3_prefetch_bucket_size": bucket,
        "stage3_max_live_parameters": 7,  # the user's stays
        "stage3_max_reuse_distance": bucket,
    }
    assert sized_for({"zero_optimization": {"stage": 1}}, model)["zero_optimization"] == {
        "stage": 1,
        "reduce_bucket_size": bucket,
    }


def test_gradients_stay_in_memory_where_the_state_lies_on_a_disk() -> None:
    on_disk = {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}
    assert keeping_gradients(on_disk, 10_000_000, 2)["aio"]["block_size"] == 20 << 20  # 20 MB, in whole megabytes
    assert keeping_gradients({**on_disk, "aio": {"block_size": 1 << 30}}, 10, 2)["aio"]["block_size"] == 1 << 30
    in_memory = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    assert keeping_gradients(in_memory, 10_000_000, 2) == in_memory
