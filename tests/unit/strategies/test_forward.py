"""A model's forward goes through its strategy, and the user keeps the very same object."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import nn

from keepstep.errors import LoopError
from keepstep.strategies.forward import Inner, adopt, hold_of, scale_gradient, to_float32, weighted


class Net(nn.Module):
    """A model with an attribute and a method of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.name = "net"

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        output: torch.Tensor = self.linear(x) * scale
        return output

    def generate(self) -> torch.Tensor:
        output: torch.Tensor = self(torch.ones(1, 2))
        return output


class Hold:
    """Stands for a strategy's hold on a model."""

    enters_by_call = False

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.original = adopt(module, self)  # type: ignore[arg-type]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append((args, kwargs))
        return self.original(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None


def test_a_call_goes_through_the_hold() -> None:
    model = Net()
    x = torch.randn(3, 2)
    expected = model(x, scale=2.0)
    hold = Hold(model)
    assert torch.equal(model(x, scale=2.0), expected)
    assert hold.calls == [((x,), {"scale": 2.0})]
    assert hold_of(model) is hold  # type: ignore[comparison-overlap]


def test_the_model_stays_the_users_own() -> None:
    model = Net()
    names, parameters = list(model.state_dict()), list(model.parameters())
    hold = Hold(model)
    assert isinstance(model, Net) and type(model).__name__ == "Net" and model.name == "net"
    assert list(model.state_dict()) == names
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert list(model.children()) == [model.linear], "the hold is no child"
    assert list(inspect.signature(model.forward).parameters) == ["x", "scale"], "as libraries look it up"
    model.generate()
    assert len(hold.calls) == 1


def test_hooks_of_the_model_run_once() -> None:
    model = Net()
    calls: list[str] = []
    model.register_forward_pre_hook(lambda *_: calls.append("before"))
    model.register_forward_hook(lambda *_: calls.append("after"))
    Hold(model)
    model(torch.ones(1, 2))
    assert calls == ["before", "after"]


def test_other_models_of_the_class_are_left_alone() -> None:
    model, other = Net(), Net()
    hold = Hold(model)
    other(torch.ones(1, 2))
    assert hold.calls == [] and hold_of(other) is None and type(other) is Net


def test_a_deep_copy_is_a_model_of_its_own() -> None:
    """An EMA: it runs its own forward on its own weights."""
    model = Net()
    hold = Hold(model)
    ema = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in ema.parameters():
            parameter.zero_()
    assert ema(torch.ones(1, 2)).item() == 0.0
    assert hold.calls == [] and hold_of(ema) is None
    assert model(torch.ones(1, 2)).item() != 0.0


def test_a_copy_can_be_prepared_itself() -> None:
    model = Net()
    hold = Hold(model)
    twin = copy.deepcopy(model)
    own = Hold(twin)
    twin(torch.ones(1, 2))
    assert len(own.calls) == 1 and hold.calls == []


def test_a_shallow_copy_is_not_held() -> None:
    model = Net()
    hold = Hold(model)
    shallow = copy.copy(model)
    shallow(torch.ones(1, 2))
    assert hold_of(shallow) is None and hold.calls == []


def test_a_forward_that_was_set_on_the_model_itself_is_kept() -> None:
    """As activation checkpointing, or a library that patches models, does."""
    model = Net()
    model.forward = lambda x: x + 1  # type: ignore[method-assign, assignment]
    hold = Hold(model)
    assert model(torch.ones(1)).item() == 2.0
    assert len(hold.calls) == 1


def test_a_model_without_a_hold_has_none() -> None:
    assert hold_of(Net()) is None


@pytest.mark.parametrize("factor", [0.0, 0.5, 4 / 3])
def test_a_scaled_gradient_is_scaled_and_the_value_is_not(factor: float) -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    output = scale_gradient(x * 3, factor)
    assert output.tolist() == [3.0, 6.0]
    output.sum().backward()
    assert x.grad is not None and x.grad.tolist() == pytest.approx([3 * factor, 3 * factor])


def test_gradients_are_scaled_wherever_tensors_are_in_the_output() -> None:
    x = torch.ones(2, requires_grad=True)
    output = scale_gradient({"logits": x * 2, "extra": (x * 3, 5, None, torch.ones(2))}, 0.5)
    assert output["extra"][1:3] == (5, None)
    (output["logits"].sum() + output["extra"][0].sum()).backward()
    assert x.grad is not None and x.grad.tolist() == [2.5, 2.5]


def test_an_output_that_cannot_be_weighted_is_refused() -> None:
    with pytest.raises(LoopError) as error:
        weighted(nn.Linear(1, 1), lambda: torch.ones(2), 0.5, (), {})
    assert "the model returned a Tensor in which no tensor has a gradient" in str(error.value)
    assert "return tensors, tuples or dicts, or set drop_last=True" in str(error.value)


def test_half_outputs_come_back_as_float32_and_others_as_they_are() -> None:
    output = to_float32(
        {
            "a": torch.ones(1, dtype=torch.bfloat16),
            "b": [torch.ones(1, dtype=torch.float16)],
            "c": torch.ones(1).double(),
        }
    )
    assert output["a"].dtype == output["b"][0].dtype == torch.float32
    assert output["c"].dtype == torch.float64
    integers = torch.ones(1, dtype=torch.int32)
    assert to_float32((integers, "text"))[0] is integers


def test_what_is_wrapped_enters_the_model_at_its_original_forward() -> None:
    model = Net()
    hold = Hold(model)
    inner = Inner(model, hold.original)
    x = torch.ones(1, 2)
    assert torch.equal(inner(x, scale=3.0), hold.original(x, scale=3.0))
    assert hold.calls == []
    assert [name for name, _ in inner.named_parameters()] == ["model.linear.weight", "model.linear.bias"]
