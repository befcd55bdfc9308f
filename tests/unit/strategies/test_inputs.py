"""Layers whose weights have 16 bits take what a buffer of 32 was added to."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from keepstep.strategies.inputs import follow_weights


@pytest.mark.parametrize(
    "layer",
    [nn.LayerNorm(8), nn.GroupNorm(2, 8), nn.RMSNorm(8), nn.Linear(8, 8), nn.Conv1d(8, 4, 1)],
    ids=lambda layer: type(layer).__name__,
)
def test_a_wider_input_is_narrowed(layer: nn.Module) -> None:
    follow_weights(layer)
    inputs = torch.randn(2, 8, 1) if isinstance(layer, nn.Conv1d) else torch.randn(2, 8)
    assert layer(inputs).dtype == torch.float32, "as long as the weights have 32 bits"
    whole = copy.deepcopy(layer)
    assert layer.bfloat16()(inputs).dtype == torch.bfloat16
    assert whole(inputs).dtype == torch.float32, "a copy goes by its own weights"


def test_a_layer_without_weights_and_other_types_are_left_alone() -> None:
    model = nn.Sequential(nn.LayerNorm(8, elementwise_affine=False), nn.Embedding(4, 8), nn.Linear(8, 2))
    follow_weights(model)
    assert model.bfloat16()[2](input=torch.randn(2, 8)).dtype == torch.bfloat16, "also by name"
    assert model[0](torch.randn(2, 8)).dtype == torch.float32
    assert model.bfloat16()[1](torch.arange(4)).dtype == torch.bfloat16
