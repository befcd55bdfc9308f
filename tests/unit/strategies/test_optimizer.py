"""An optimizer's state is kept by name, through fp16's scaling, saving and loading."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from keepstep.checkpoint.tree import Tensors, put_together, take_apart
from keepstep.config import StrategyConfig
from keepstep.errors import CheckpointError, ConfigError, LoopError
from keepstep.strategies import Setup, make_strategy
from keepstep.strategies.base import PreparedModel
from keepstep.strategies.optimizer import PreparedOptimizer

CPU = torch.device("cpu")
MakeOptimizer = Callable[..., torch.optim.Optimizer]


def hold(module: nn.Module) -> PreparedModel:
    return make_strategy("single", Setup(StrategyConfig(), CPU, 1, 1)).prepare(module)


def prepare(
    optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None = None, **modules: nn.Module
) -> PreparedOptimizer:
    prepared = PreparedOptimizer(optimizer, scaler)
    prepared.remember_names({name: dict(module.named_parameters()) for name, module in modules.items()})
    prepared.reconnect({name: hold(module) for name, module in modules.items()})
    return prepared


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.full((1, 2), float(step + 1))).pow(2).sum().backward()
        optimizer.step()


def through_checkpoint(state: dict[str, Any]) -> dict[str, Any]:
    tensors: Tensors = {}
    json = take_apart(state, "optimizer", tensors)
    found: dict[str, Any] = put_together(json, {key: tensor.clone() for key, tensor in tensors.items()})
    return found


def pair(make: MakeOptimizer) -> tuple[nn.Module, torch.optim.Optimizer, PreparedOptimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    optimizer = make(model.parameters())
    return model, optimizer, prepare(optimizer, model=model)


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.1, betas=(0.8, 0.95), amsgrad=True),
        lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(0.1)),
        lambda parameters: torch.optim.RMSprop(parameters, lr=0.01, centered=True, momentum=0.1),
        lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
        lambda parameters: torch.optim.Adadelta(parameters, lr=0.1),
        lambda parameters: torch.optim.NAdam(parameters, lr=0.1),
    ],
    ids=["sgd", "momentum", "adamw", "tensor lr", "rmsprop", "adagrad", "adadelta", "nadam"],
)
def test_an_optimizer_goes_on_from_its_state_bit_for_bit(make: MakeOptimizer) -> None:
    model, optimizer, prepared = pair(make)
    train(model, optimizer, 3)
    state = through_checkpoint(prepared.state_dict())
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    train(model, optimizer, 3)
    other, other_optimizer, other_prepared = pair(make)
    other.load_state_dict(weights)
    other_prepared.load_state_dict(state)
    train(other, other_optimizer, 3)
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name


def test_state_is_kept_by_model_and_name() -> None:
    generator, critic = nn.Linear(2, 1), nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.Adam([*generator.parameters(), *critic.parameters()])
    prepared = prepare(optimizer, model=generator, model_2=critic)
    (generator(torch.ones(1, 2)) + critic(torch.ones(1, 2))).sum().backward()
    optimizer.step()
    state = prepared.state_dict()
    assert {model: set(named) for model, named in state["state"].items()} == {
        "model": {"weight", "bias"},
        "model_2": {"weight"},
    }
    assert state["groups"][0]["params"] == [["model", "weight"], ["model", "bias"], ["model_2", "weight"]]


def test_groups_keep_their_hyperparameters() -> None:
    def make() -> tuple[torch.optim.Optimizer, PreparedOptimizer]:
        model = nn.Linear(2, 1)
        groups = [{"params": [model.weight], "lr": 0.1}, {"params": [model.bias], "lr": 0.2, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=0.5)
        return optimizer, prepare(optimizer, model=model)

    optimizer, prepared = make()
    optimizer.param_groups[0]["lr"] = 0.025  # as a scheduler does
    other, other_prepared = make()
    other_prepared.load_state_dict(through_checkpoint(prepared.state_dict()))
    assert [group["lr"] for group in other.param_groups] == [0.025, 0.2]
    assert other.param_groups[1]["weight_decay"] == 0.0
    assert other.param_groups[0]["betas"] == (0.9, 0.999)
    assert all(isinstance(p, nn.Parameter) for group in other.param_groups for p in group["params"])


def test_a_parameter_that_never_had_a_gradient_has_no_state() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    prepared = prepare(optimizer, model=model)
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    state = through_checkpoint(prepared.state_dict())
    assert set(state["state"]["model"]) == {"weight"}
    prepared.load_state_dict(state)


def test_tied_weights_are_named_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = self.head(self.embed(x))
            return output

    model = Tied()
    optimizer = torch.optim.Adam(model.parameters())
    prepared = prepare(optimizer, model=model)
    train(model, optimizer)
    state = through_checkpoint(prepared.state_dict())
    assert set(state["state"]["model"]) == {"embed.weight"}
    prepared.load_state_dict(state)
    assert optimizer.state[model.head.weight]["step"].item() == 1


def test_parameters_of_no_prepared_model_are_refused() -> None:
    model, other = nn.Linear(2, 1), nn.Linear(5, 3)
    prepared = PreparedOptimizer(torch.optim.SGD([*model.parameters(), *other.parameters()]), None)
    with pytest.raises(ConfigError) as error:
        prepared.remember_names({"model": dict(model.named_parameters())})
    assert "the optimizer SGD holds 2 parameter(s) that are in no prepared model" in str(error.value)
    assert "the first has shape (3, 5)" in str(error.value)
    assert "pass the model they belong to to the same run.prepare(...)" in str(error.value)


def test_an_optimizer_that_has_stepped_is_refused() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer)
    prepared = PreparedOptimizer(optimizer, None)
    with pytest.raises(ConfigError, match=r"has stepped before run.prepare\(...\); prepare it before it steps"):
        prepared.remember_names({"model": dict(model.named_parameters())})


def test_state_of_another_script_is_refused() -> None:
    _, _, prepared = pair(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    state = prepared.state_dict()
    state["groups"][0]["params"] = state["groups"][0]["params"][:-1]
    with pytest.raises(CheckpointError, match=r"has \[3\] parameters in its groups, this one has \[4\]"):
        prepared.load_state_dict(state)


def test_parameters_in_another_order_are_refused_not_mixed_up() -> None:
    _, _, prepared = pair(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    state = prepared.state_dict()
    state["groups"][0]["params"].reverse()
    with pytest.raises(CheckpointError, match="or they are named otherwise"):
        prepared.load_state_dict(state)


def test_sharded_parameters_take_the_places_of_the_old() -> None:
    """FSDP2 replaces parameters: the groups must hold the new ones."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD([{"params": [model.bias]}, {"params": [model.weight], "lr": 0.5}], lr=0.1)
    prepared = PreparedOptimizer(optimizer, None)
    prepared.remember_names({"model": dict(model.named_parameters())})
    model.weight, model.bias = nn.Parameter(torch.zeros(1, 2)), nn.Parameter(torch.zeros(1))
    prepared.reconnect({"model": hold(model)})
    assert optimizer.param_groups[0]["params"][0] is model.bias
    assert optimizer.param_groups[1]["params"][0] is model.weight


def test_a_step_is_noted() -> None:
    model, optimizer, prepared = pair(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    assert not prepared.stepped
    train(model, optimizer)
    assert prepared.stepped


def test_a_target_is_laid_out_as_the_parameter_or_as_asked() -> None:
    _, _, prepared = pair(lambda parameters: torch.optim.Adam(parameters))
    like = prepared.target("model", "0.weight", "exp_avg", torch.Size([3, 2]), torch.float32)
    assert like.shape == (3, 2) and not like.requires_grad
    step = prepared.target("model", "0.weight", "step", torch.Size([]), torch.float64)
    assert step.shape == () and step.dtype == torch.float64


# -- fp16 -------------------------------------------------------------------------------------------------------------


def scaled() -> tuple[nn.Linear, torch.optim.Optimizer, torch.amp.GradScaler, PreparedOptimizer]:
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    return model, optimizer, scaler, prepare(optimizer, scaler, model=model)


def backward(model: nn.Module, scaler: torch.amp.GradScaler, prepared: PreparedOptimizer, by: float = 1.0) -> None:
    """What `run.backward` does."""
    scaler.scale(model(torch.ones(1, 2)).sum() * by).backward()  # type: ignore[no-untyped-call]
    prepared.backward_seen = True


def test_an_fp16_step_uses_the_gradient_at_its_true_size() -> None:
    model, optimizer, scaler, prepared = scaled()
    before = model.weight.detach().clone()
    backward(model, scaler, prepared)
    optimizer.step()
    assert torch.allclose(before - model.weight, torch.ones(1, 2))
    assert prepared.stepped and not prepared.backward_seen


def test_an_fp16_step_without_the_scaled_backward_is_refused() -> None:
    model, optimizer, _, _ = scaled()
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(LoopError, match=r"fp16 needs run.backward\(loss\) in place of loss.backward\(\)"):
        optimizer.step()


def test_an_overflow_skips_the_update_and_counts_as_a_step() -> None:
    model, optimizer, scaler, prepared = scaled()
    before = model.weight.detach().clone()
    backward(model, scaler, prepared, by=float("inf"))
    optimizer.step()
    assert torch.equal(model.weight, before)
    assert prepared.stepped
    scaler.update()
    assert scaler.get_scale() == 512.0


def test_unscaling_happens_once_a_step() -> None:
    model, optimizer, scaler, prepared = scaled()
    prepared.unscale()  # nothing to do before a backward
    backward(model, scaler, prepared)
    prepared.unscale()
    prepared.unscale()
    assert model.weight.grad is not None and torch.allclose(model.weight.grad, torch.ones(1, 2))
    before = model.weight.detach().clone()
    optimizer.step()
    assert torch.allclose(before - model.weight, torch.ones(1, 2))


@pytest.mark.parametrize("made_before", [True, False])
def test_schedulers_work_with_a_scaled_optimizer(made_before: bool) -> None:
    """Made before `prepare` or after it."""
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5) if made_before else None
    prepared = prepare(optimizer, scaler, model=model)
    scheduler = scheduler or torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    backward(model, scaler, prepared)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.5
