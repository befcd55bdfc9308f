"""Which parts of a model are its blocks, and that recomputing them changes nothing but memory."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from keepstep.errors import ConfigError
from keepstep.strategies.blocks import checkpoint_activations, find_blocks


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(width, width), nn.Dropout(0.5)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x + self.dropout(torch.tanh(self.linear(x)))


class Other(Block):
    pass


class Model(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.embed, self.blocks, self.head = nn.Linear(4, 4), nn.ModuleList(blocks), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        output: torch.Tensor = self.head(x)
        return output


def names(model: nn.Module) -> list[str]:
    found = find_blocks(model)
    by_id = {id(module): name for name, module in model.named_modules()}
    return [by_id[id(block)] for block in found]


def test_repeated_classes_in_a_list_are_blocks() -> None:
    assert names(Model(Block(), Block(), Block())) == ["blocks.0", "blocks.1", "blocks.2"]


def test_one_of_a_kind_is_no_block() -> None:
    assert names(Model(Block())) == []
    assert names(Model(Block(), Other())) == []


def test_blocks_of_several_lists_count_together() -> None:
    """A ResNet's stages, an encoder and a decoder."""
    model = nn.Sequential(nn.Sequential(Block()), nn.Sequential(Block()))
    assert names(model) == ["0.0", "1.0"]


def test_layers_without_children_are_no_blocks() -> None:
    assert names(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU())) == []


def test_containers_are_no_blocks() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4)))
    assert names(model) == []


def test_parts_without_weights_are_no_blocks() -> None:
    class Activation(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.relu = nn.ReLU()

    assert names(nn.Sequential(Activation(), Activation())) == []


def test_a_model_may_name_its_blocks() -> None:
    class Named(Model):
        _no_split_modules = ("Other",)

    assert names(Named(Block(), Block(), Other())) == ["blocks.2"]


def test_an_empty_list_of_names_is_as_none() -> None:
    class Unnamed(Model):
        _no_split_modules: tuple[str, ...] = ()

    assert names(Unnamed(Block(), Block())) == ["blocks.0", "blocks.1"]


def test_outer_blocks_come_before_those_inside() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.ModuleList([Block(), Block()])

    model = nn.Sequential(Outer(), Outer())
    assert names(model) == ["0", "0.inner.0", "0.inner.1", "1", "1.inner.0", "1.inner.1"]


def test_recomputed_blocks_give_the_same_gradients() -> None:
    """Dropout included: the same numbers are drawn again."""
    plain = Model(Block(), Block())
    recomputed = copy.deepcopy(plain)
    checkpoint_activations(recomputed)
    x = torch.randn(3, 4)
    for model in (plain, recomputed):
        torch.manual_seed(5)
        model(x).sum().backward()
    for a, b in zip(plain.parameters(), recomputed.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None
        assert torch.equal(a.grad, b.grad)
    assert [block.calls for block in plain.blocks] == [1, 1]
    assert [block.calls for block in recomputed.blocks] == [2, 2]


def test_recomputing_keeps_names_and_state() -> None:
    model = Model(Block(), Block())
    before = list(model.state_dict())
    checkpoint_activations(model)
    assert list(model.state_dict()) == before


def test_a_copy_of_a_recomputed_model_uses_its_own_weights() -> None:
    model = Model(Block(), Block()).eval()
    checkpoint_activations(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert twin(torch.ones(1, 4)).item() == 0.0
    assert model(torch.ones(1, 4)).item() != 0.0


def test_recomputing_nothing_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(ConfigError) as error:
        checkpoint_activations(nn.Linear(2, 2))
    assert "--activation-checkpointing found no repeated blocks in Linear" in str(error.value)
    assert '_no_split_modules = ["Block"]' in str(error.value)
