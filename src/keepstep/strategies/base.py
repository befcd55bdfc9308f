"""What every strategy offers: the user's own model object, made to run over all workers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from keepstep.config import StrategyConfig
from keepstep.strategies.blocks import checkpoint_activations
from keepstep.strategies.buffers import BufferSync
from keepstep.strategies.checks import check_device
from keepstep.strategies.forward import adopt, to_float32, weighted
from keepstep.strategies.inputs import follow_weights

if TYPE_CHECKING:
    from keepstep.strategies.optimizer import PreparedOptimizer

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Setup:
    """What a strategy has to know of the worker it runs in."""

    config: StrategyConfig
    device: torch.device
    world_size: int
    local_world_size: int

    @property
    def half(self) -> torch.dtype | None:
        """The 16-bit type to compute in, if any."""
        return HALF.get(self.config.precision)


class Scaler(Protocol):
    """What keeps fp16's gradients from underflowing: torch's GradScaler, or what acts as one."""

    def scale(self, loss: torch.Tensor, /) -> torch.Tensor: ...

    def step(self, optimizer: torch.optim.Optimizer, /, *args: Any, **kwargs: Any) -> Any: ...

    def update(self) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> None: ...


class PreparedModel:
    """A strategy's hold on one model. The user keeps the model object itself; its forward comes through here."""

    enters_by_call = False
    """Whether it takes over when the model is called, rather than in its forward, when its hooks have run."""
    is_entered = False
    """Whether the strategy itself is calling the model."""

    def __init__(self, module: nn.Module, setup: Setup) -> None:
        self.module, self._setup = module, setup
        self.gradient_weight = 1.0
        """What this worker's gradient counts for in this step; 1.0 but in an uneven batch."""
        self.in_step = False
        """Whether a step is under way: then gradients are made, whatever mode the model is in."""
        self._buffers = BufferSync(module, setup.world_size)
        self._original: Callable[..., Any] = adopt(module, self)
        if setup.config.compile:
            self._original = self._compiled(self._original)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model as the strategy wants it; called in place of the model's own forward."""
        if self.gradient_weight != 1.0 and torch.is_grad_enabled():
            return weighted(self.module, self._run, self.gradient_weight, args, kwargs)
        return self._run(*args, **kwargs)

    def _compiled(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        compiled: Callable[..., Any] = torch.compile(forward)
        return compiled

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        return self._compute(*args, **kwargs)

    def _compute(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own forward, in the asked-for arithmetic."""
        if self._setup.half is None:
            return self._original(*args, **kwargs)
        with self.arithmetic():
            output = self._original(*args, **kwargs)
        return to_float32(output)

    def arithmetic(self) -> AbstractContextManager[Any]:
        """Within, operations choose their types as `--precision` says."""
        half = self._setup.half
        return nullcontext() if half is None else torch.autocast(self._setup.device.type, dtype=half)

    def sync_buffers(self) -> None:
        """Gives every worker rank 0's buffers (BatchNorm's running statistics), where they have changed."""
        self._buffers.sync()

    @contextmanager
    def no_gradient_sync(self) -> Iterator[None]:
        """Within, backward only accumulates."""
        yield

    def clip_grad_norm(self, max_norm: float, norm_type: float) -> torch.Tensor:
        """Scales the whole model's gradient down to `max_norm`; returns the norm it had."""
        norm = nn.utils.clip_grad_norm_(self.module.parameters(), max_norm, norm_type)
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm

    def check_averaged(self) -> None:
        """Raises, before the optimizer steps, if there are gradients that no worker has exchanged."""

    def gradients_used(self) -> None:
        """An optimizer has stepped, and the step is over."""

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters by the names they have in the bare model; a tied one under each of its names."""
        return dict(self.module.named_parameters(remove_duplicate=False))

    def _complete_state_dict(self, complete: Callable[[dict[str, Any]], None]) -> None:
        """Has `model.state_dict()`, called by the user, completed where a strategy has left nothing of use in it."""

        def hook(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
            if module is self.module and not prefix:  # not a copy of the model; not a wrapper's call, or our own
                complete(state)

        self.module.register_state_dict_post_hook(hook)  # type: ignore[no-untyped-call]

    def state(self) -> dict[str, Any]:
        """Weights and buffers by name, as tensors that share memory with the model."""
        return dict(self.module.state_dict())

    def load_state(self, state: dict[str, Any]) -> None:
        """Takes back what `state` gave, after it was filled in place."""
        # Tensors share memory with the model; extra state has to be handed over.
        if any(key.endswith("_extra_state") for key in state):
            self.module.load_state_dict(state, strict=True)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
        """The optimizer's state by parameter name."""
        names: dict[torch.Tensor, str] = {p: name for name, p in reversed(self.named_parameters().items())}
        return {names[p]: dict(state) for p, state in optimizer.state.items() if p in names and state}

    def optimizer_target(
        self, optimizer: torch.optim.Optimizer, name: str, what: str, shape: torch.Size, dtype: torch.dtype
    ) -> Any:
        """Memory to load `what` of a parameter's optimizer state into, laid out as the parameter is."""
        parameter = self.named_parameters()[name]
        if parameter.shape == shape:
            return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        return torch.empty(shape, dtype=dtype)

    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any] | None:
        """Turns what `optimizer_state` gave, filled, into what `optimizer.load_state_dict` wants, still by name.

        None: it has taken it in itself.
        """
        return state

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of the model (an EMA) is a plain model: it does not come with the strategy's hold on it."""
        return None


class Strategy(ABC):
    """Spreads models over the workers. Knows nothing of how the workers were started."""

    name: str
    needs_process_group = False
    """Whether it needs a process group even for one worker."""
    collective_forward = False
    """Whether every worker must call forward equally often."""
    narrows_weights = False
    """Whether weights themselves have 16 bits in forward, where `--precision` says so."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.check()

    def check(self) -> None:
        """Raises where the strategy cannot do what the flags ask."""
        check_device(self.name, self.setup.config, self.setup.device.type)

    @abstractmethod
    def wrap(self, module: nn.Module) -> PreparedModel:
        """Spreads one model, which is on the device already."""

    def prepare(self, module: nn.Module) -> PreparedModel:
        """Moves one model to the device and spreads it."""
        if self.setup.config.activation_checkpointing:
            checkpoint_activations(module)
        module.to(self.setup.device)
        if self.narrows_weights and self.setup.half is not None:
            follow_weights(module)
        return self.wrap(module)

    def join(self, models: dict[str, PreparedModel], optimizers: list[PreparedOptimizer]) -> None:  # noqa: B027
        """For a strategy that wants a model and its optimizer together, once both are prepared."""

    def gradient_scaler(self) -> Scaler | None:
        """What keeps fp16's gradients from underflowing; None for other types."""
        if self.setup.config.precision != "fp16":
            return None
        return torch.amp.GradScaler(self.setup.device.type)
