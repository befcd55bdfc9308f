"""Where ZeRO puts the parts of an optimizer's state that are one for a whole parameter."""

from __future__ import annotations

import pytest
import torch

from keepstep.strategies.deepspeed import _placed

META = torch.device("meta")  # stands for a GPU


@pytest.mark.parametrize(("flags", "device"), [({}, "cpu"), ({"fused": True}, "meta"), ({"capturable": True}, "meta")])
def test_a_count_of_steps_goes_where_the_optimizer_reads_it(flags: dict[str, bool], device: str) -> None:
    """As torch's own `load_state_dict` has it."""
    found = _placed(torch.tensor(3.0), "step", META, [{"lr": 0.1}, flags])
    assert found.device.type == device


def test_other_values_go_to_the_device_and_plain_ones_stay() -> None:
    assert _placed(torch.tensor(0.9), "mu_product", META, [{}]).device == META
    assert _placed(7, "step", META, [{"fused": True}]) == 7
