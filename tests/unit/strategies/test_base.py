"""What every strategy offers, shown on the one that needs no process group."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from keepstep.config import StrategyConfig
from keepstep.errors import ConfigError
from keepstep.strategies import Setup, Strategy, make_strategy
from keepstep.strategies.base import PreparedModel

CPU = torch.device("cpu")


def single(**config: Any) -> Strategy:
    return make_strategy("single", Setup(StrategyConfig(**config), CPU, 1, 1))


def prepare(module: nn.Module, **config: Any) -> PreparedModel:
    return single(**config).prepare(module)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.tied = nn.Linear(2, 2)
        self.tied.weight = self.linear.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.tied(self.linear(x))
        return output


def test_a_prepared_model_computes_what_it_did() -> None:
    model = Net()
    x = torch.randn(3, 2)
    expected = model(x)
    prepare(model)
    assert torch.equal(model(x), expected)


def test_a_step_of_an_uneven_batch_is_weighted() -> None:
    model = Net()
    hold = prepare(model)
    model(torch.ones(1, 2)).sum().backward()
    plain = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    hold.gradient_weight = 0.25
    model(torch.ones(1, 2)).sum().backward()
    for parameter, gradient in zip(model.parameters(), plain, strict=True):
        assert torch.allclose(parameter.grad, gradient * 0.25)  # type: ignore[arg-type]


def test_a_gradient_that_flows_through_two_models_is_weighted_once() -> None:
    """A generator and its critic, an encoder and a decoder: in an uneven batch each has its share, not its square."""
    first, second = nn.Linear(2, 2), nn.Linear(2, 1)
    holds = [prepare(first), prepare(second)]
    second(first(torch.ones(1, 2))).sum().backward()
    plain = [p.grad.clone() for model in (first, second) for p in model.parameters() if p.grad is not None]
    for hold in holds:
        hold.module.zero_grad()
        hold.gradient_weight = 0.5
    second(first(torch.ones(1, 2))).sum().backward()
    weighted = [p.grad for model in (first, second) for p in model.parameters()]
    for gradient, expected in zip(weighted, plain, strict=True):
        assert torch.allclose(gradient, expected * 0.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_a_model_applied_to_its_own_output_is_weighted_once(weight: float) -> None:
    model = nn.Linear(2, 2)
    hold = prepare(model)
    model(model(torch.ones(1, 2))).sum().backward()
    plain = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    hold.gradient_weight = weight
    model(model(torch.ones(1, 2))).sum().backward()
    for parameter, expected in zip(model.parameters(), plain, strict=True):
        assert torch.allclose(parameter.grad, expected * weight)  # type: ignore[arg-type]


def test_a_frozen_model_has_no_gradient_to_weight() -> None:
    """A teacher, called without `torch.no_grad()`, in an uneven batch."""
    teacher = Net().requires_grad_(False)
    prepare(teacher).gradient_weight = 0.5
    assert teacher(torch.ones(1, 2)).shape == (1, 2)


def test_an_evaluation_needs_no_weight() -> None:
    model = Net()
    prepare(model).gradient_weight = 0.25
    with torch.no_grad():
        model(torch.ones(1, 2))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_computes_in_it_and_answers_in_float32(precision: str) -> None:
    seen: list[torch.dtype] = []
    model = Net()
    model.linear.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    prepare(model, precision=precision)
    output = model(torch.randn(3, 2))
    assert seen == [{"bf16": torch.bfloat16, "fp16": torch.float16}[precision]]
    assert output.dtype == torch.float32
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


def test_only_fp16_needs_its_gradients_scaled() -> None:
    assert single(precision="fp16").gradient_scaler() is not None
    assert all(single(precision=precision).gradient_scaler() is None for precision in ("fp32", "tf32", "bf16"))


def test_activation_checkpointing_is_applied() -> None:
    with pytest.raises(ConfigError, match="--activation-checkpointing found no repeated blocks in Net"):
        prepare(Net(), activation_checkpointing=True)


def test_offloading_from_the_cpu_is_refused() -> None:
    setup = Setup(StrategyConfig(strategy="fsdp2", cpu_offload=True), CPU, 2, 2)
    with pytest.raises(ConfigError, match="--cpu-offload moves state from the GPU to the host; this run is on the CPU"):
        make_strategy("fsdp2", setup)


def test_parameters_are_known_by_each_of_their_names() -> None:
    named = prepare(Net()).named_parameters()
    assert set(named) == {"linear.weight", "linear.bias", "tied.weight", "tied.bias"}
    assert named["linear.weight"] is named["tied.weight"]


def test_state_shares_memory_with_the_model() -> None:
    """So that loading fills the model where it is."""
    model = Net()
    hold = prepare(model)
    state = hold.state()
    state["linear.bias"].fill_(5.0)
    hold.load_state(state)
    assert model.linear.bias.tolist() == [5.0, 5.0]


class Extra(nn.Module):
    """A module with state of its own, as quantised layers have."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.linear, self.value = nn.Linear(1, 1), value

    def get_extra_state(self) -> Any:
        return copy.deepcopy(self.value)

    def set_extra_state(self, state: Any) -> None:
        self.value = state


@pytest.mark.parametrize(("before", "after"), [({"scale": 1}, {"scale": 2}), (torch.ones(2), torch.zeros(2))])
def test_extra_state_is_handed_back_whatever_it_is(before: Any, after: Any) -> None:
    model = Extra(before)
    hold = prepare(model)
    hold.load_state({**hold.state(), "_extra_state": after})
    assert str(model.value) == str(after)


def test_gradients_are_clipped_and_their_norm_is_told() -> None:
    model = nn.Linear(2, 1, bias=False)
    hold = prepare(model)
    model.weight.grad = torch.tensor([[3.0, 4.0]])
    assert hold.clip_grad_norm(1.0, 2.0).item() == pytest.approx(5.0)
    assert model.weight.grad.norm().item() == pytest.approx(1.0, abs=1e-4)


def test_a_copy_of_the_model_comes_without_the_hold() -> None:
    model = Net()
    hold = prepare(model)
    hold.gradient_weight = 0.0
    ema = copy.deepcopy(model)
    ema(torch.ones(1, 2)).sum().backward()
    assert ema.linear.bias.grad is not None and ema.linear.bias.grad.abs().sum() > 0


def test_every_strategy_is_known_by_its_name() -> None:
    from keepstep.config import STRATEGIES

    for name in STRATEGIES:
        if name != "auto":
            assert make_strategy(name, Setup(StrategyConfig(strategy=name), CPU, 2, 2)).name == name
