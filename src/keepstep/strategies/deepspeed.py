"""ZeRO: optimizer state (1), gradients (2) and weights (3) divided between the workers, by DeepSpeed."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from keepstep.errors import ConfigError, LoopError
from keepstep.fragment import Fragment
from keepstep.strategies.base import PreparedModel, Scaler, Setup, Strategy
from keepstep.strategies.deepspeed_config import deepspeed_config, keeping_gradients, refusal, sized_for
from keepstep.strategies.forward import to_float32
from keepstep.strategies.optimizer import PreparedOptimizer
from keepstep.strategies.zero_state import Slot, frozen_fragment, gathered, on_disk, refresh_weights, resident, slots

_OWN = "own."
"""The prefix by which our own look at the model's state is known."""
_WHOLE_TENSOR_OPTIMIZERS = ("Adafactor", "LBFGS", "Muon", "SparseAdam")
"""Of torch's own: those whose update of one number depends on its row, its matrix or all of them."""


def _deepspeed(device: torch.device) -> Any:
    """The package, told which device to use before it looks for itself."""
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if device.type == "cuda" else "cpu")
    os.environ.setdefault("LOCAL_RANK", str(device.index or 0))  # which nobody sets for a run in this process
    # It uses names that torch 2.13 is about to change, and so warns at every step.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    warnings.filterwarnings("ignore", r"`torch\.jit\.\w+` is deprecated", DeprecationWarning)
    try:
        import deepspeed
    except ImportError:
        raise ConfigError(
            "--strategy zero1, zero2 and zero3 need DeepSpeed: pip install --no-build-isolation 'keepstep[deepspeed]'"
        ) from None
    deepspeed.utils.logger.setLevel("WARNING")
    # Its own all-reduce through shared memory is compiled for a minute at first use, sums in another order than
    # gloo, and leaves the workers of a killed one waiting at a flag in memory.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.utils.groups._WORLD_GROUP = None  # an earlier run in this process left its own, which is gone
    return deepspeed


class ZeroScaler:
    """DeepSpeed's own loss scale for fp16, in the words of torch's GradScaler: a checkpoint has one kind."""

    def __init__(self) -> None:
        self._model: ZeroModel | None = None

    def attach(self, model: ZeroModel) -> None:
        self._model = model

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = self._engine.scale(loss)
        return scaled

    def step(self, _: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        assert self._model is not None
        return self._model.step(*args, **kwargs)

    def update(self) -> None:
        """Done in DeepSpeed's step."""

    @property
    def _engine(self) -> Any:
        if self._model is None:
            raise LoopError("run.backward(loss) needs a model and its optimizer, prepared together, under ZeRO")
        return self._model.engine

    def state_dict(self) -> dict[str, Any]:
        scaler = self._engine.optimizer.loss_scaler
        return {
            "scale": float(scaler.cur_scale),
            "growth_factor": float(scaler.scale_factor),
            "backoff_factor": 1.0 / float(scaler.scale_factor),
            "growth_interval": int(scaler.scale_window),
            "_growth_tracker": max(0, scaler.cur_iter - scaler.last_overflow_iter - 1) % int(scaler.scale_window),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        scaler = self._engine.optimizer.loss_scaler
        scaler.cur_scale = state["scale"]
        scaler.cur_iter, scaler.last_overflow_iter = int(state["_growth_tracker"]), -1


class ZeroModel(PreparedModel):
    """DeepSpeed's engine behind the user's own model, and its ZeRO optimizer behind the user's own optimizer."""

    enters_by_call = True

    def __init__(self, module: nn.Module, setup: Setup) -> None:
        super().__init__(module, setup)
        self.engine: Any = None
        self._slots: dict[str, Slot] = {}
        self._reduced = False
        """Whether this step's gradients have been exchanged."""
        self._clips_itself = False

    def join(self, prepared: PreparedOptimizer, config: dict[str, Any], deepspeed: Any) -> None:
        """Hands model and optimizer over to DeepSpeed, which wants them together."""
        names = self.named_parameters()
        config = keeping_gradients(config, max(p.numel() for p in names.values()), self._setup.world_size)
        config = sized_for(config, self.module)
        self._clips_itself = bool(config.get("gradient_clipping"))
        self.engine, *_ = deepspeed.initialize(
            model=self.module, optimizer=prepared.optimizer, config=config, dist_init_required=False
        )
        self._slots = slots(self._zero, names)
        prepared.optimizer.zero_grad = self._zero_grad  # type: ignore[method-assign]
        self._complete_state_dict(self._gather_weights)

    @property
    def _zero(self) -> Any:
        return self.engine.optimizer

    # -- computing ----------------------------------------------------------------------------------------------------

    def _compiled(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        self.module.compile()
        return forward

    def _compute(self, *args: Any, **kwargs: Any) -> Any:
        if self.engine is None:  # no optimizer has its weights: a teacher
            return super()._compute(*args, **kwargs)
        # We look ourselves, in `step`, whether the loss was scaled, and say what to write.
        self.engine._manual_backward_expected = True
        self.is_entered = True
        try:
            output = self.engine(*args, **kwargs)
            return output if self._setup.half is None else to_float32(output)
        finally:
            self.is_entered = False

    # -- stepping -----------------------------------------------------------------------------------------------------

    def _exchange(self) -> None:
        """Averages the gradients over the workers, once a step: the first thing that DeepSpeed's own step does."""
        if self._reduced:
            return
        self.engine._running_engine_step = True
        if self.engine.zero_optimization_partition_gradients():
            self._zero.finalize_gradient_accumulation_boundary()
        else:
            self.engine.allreduce_gradients()
        self._reduced = True

    def step(self, *args: Any, **kwargs: Any) -> None:
        """What `optimizer.step()` does."""
        if args or kwargs:
            raise LoopError("optimizer.step(closure) is not possible under ZeRO; call optimizer.step() alone")
        self._exchange()
        try:
            self.engine._take_model_step(None)
        finally:
            self.engine._running_engine_step = self._reduced = False
            if not self._clips_itself:
                self._zero.clip_grad = 0.0

    def clip_grad_norm(self, max_norm: float, norm_type: float) -> torch.Tensor:
        if norm_type != 2.0:
            raise LoopError(f"run.clip_grad_norm(..., norm_type={norm_type}) is not possible under ZeRO; leave it at 2")
        if self._clips_itself:
            raise LoopError("gradients are clipped twice: by run.clip_grad_norm and by the DeepSpeed config")
        self._exchange()
        zero = self._zero
        groups = [zero.scaled_global_norm()] if hasattr(zero, "scaled_global_norm") else zero._get_norm_groups()
        norm: torch.Tensor = torch.linalg.vector_norm(torch.stack([torch.as_tensor(group).float() for group in groups]))
        zero.clip_grad = float(max_norm)  # the division itself is part of DeepSpeed's step
        return norm / float(zero.loss_scale)

    def _zero_grad(self, set_to_none: bool = True) -> None:
        """What `optimizer.zero_grad()` does; after a step there is nothing left to do."""
        zero = self._zero
        zero.zero_grad()
        self._reduced = False
        for kept in (zero.averaged_gradients, getattr(zero, "all_grad_tensors", {})):
            for group in kept:
                kept[group] = None

    # -- what a checkpoint holds --------------------------------------------------------------------------------------

    def _gather_weights(self, state: dict[str, Any]) -> None:
        """Puts whole weights, in host memory, where stage 3 has left nothing; collective."""
        for name, parameter in self.named_parameters().items():
            if name in state and hasattr(parameter, "ds_id"):
                state[name] = gathered(parameter)

    def state(self) -> dict[str, Any]:
        if self.engine is None:
            return super().state()
        parameters = self.named_parameters()
        with_prefix = self.module.state_dict(prefix=_OWN)
        state: dict[str, Any] = {name.removeprefix(_OWN): value for name, value in with_prefix.items()}
        for name in state.keys() & parameters.keys():
            slot = self._slots.get(name)
            state[name] = self._held(slot, None) if slot else frozen_fragment(self._zero, parameters[name])
        return state

    def load_state(self, state: dict[str, Any]) -> None:
        if self.engine is None:
            super().load_state(state)
            return
        self._write_back(state, None)
        refresh_weights(self._zero)
        for name, module in self.module.named_modules():
            key = f"{name}._extra_state".lstrip(".")
            if key in state:
                module.set_extra_state(state[key])

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
        state: dict[str, dict[str, Any]] = {}
        for name, _ in self.module.named_parameters():  # a tied one under one name
            if name in self._slots:
                slot = self._slots[name]
                kept = optimizer.state.get(slot.flat, {})
                state[name] = {w: value if _is_single(value) else self._held(slot, w) for w, value in kept.items()}
        return state

    def optimizer_target(
        self, optimizer: torch.optim.Optimizer, name: str, what: str, shape: torch.Size, dtype: torch.dtype
    ) -> Any:
        slot = self._slots[name]
        if slot.shape != shape:
            return torch.empty(shape, dtype=dtype)
        with resident(self._zero, slot.group, changes=True):
            if what not in optimizer.state[slot.flat]:
                optimizer.state[slot.flat][what] = torch.zeros_like(slot.flat, dtype=dtype, requires_grad=False)
        return self._held(slot, what)

    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any] | None:
        """Fragments are filled in place; what is one for a whole parameter is one for the whole flat memory here."""
        for what in {what for kept in state.values() for what in kept}:
            filled = {name: kept[what] for name, kept in state.items() if isinstance(kept.get(what), Fragment)}
            self._write_back(filled, what)
        for name, kept in state.items():
            flat = self._slots[name].flat
            for what, value in kept.items():
                if not isinstance(value, Fragment):
                    optimizer.state[flat][what] = _placed(value, what, flat.device, optimizer.param_groups)
        return None

    def _memory(self, slot: Slot, what: str | None) -> torch.Tensor:
        """The flat memory of weights (None), or of a part of the optimizer's state."""
        memory: torch.Tensor = slot.flat if what is None else self._zero.optimizer.state[slot.flat][what]
        return memory

    def _held(self, slot: Slot, what: str | None) -> Fragment:
        """This worker's interval: the memory itself, or a copy of what lies on a disk."""
        if not on_disk(self._zero, slot.group):
            return slot.fragment(self._memory(slot, what))
        with resident(self._zero, slot.group):
            return slot.fragment(self._memory(slot, what).clone())

    def _write_back(self, filled: dict[str, Any], what: str | None) -> None:
        """Puts what was loaded into copies onto the disk that they are copies of."""
        for name, slot in self._slots.items():
            if name in filled and on_disk(self._zero, slot.group):
                with resident(self._zero, slot.group, changes=True):
                    slot.fragment(self._memory(slot, what)).copy_(filled[name])


def _is_single(value: Any) -> bool:
    """Whether it is one value for all of a parameter's numbers, as Adam's step is."""
    return not isinstance(value, torch.Tensor) or value.dim() == 0


def _placed(value: Any, what: str, device: torch.device, groups: list[dict[str, Any]]) -> Any:
    """Where an optimizer's own `load_state_dict` puts it: a count of steps stays on the host, but for fused kernels."""
    in_kernels = any(group.get("fused") or group.get("capturable") for group in groups)
    is_on_device = isinstance(value, torch.Tensor) and (what != "step" or in_kernels)
    return value.to(device) if is_on_device else value


class Zero(Strategy):
    """What the three stages share."""

    stage: int
    needs_process_group = True
    narrows_weights = True

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._config = deepspeed_config(setup.config, self.stage)
        self._deepspeed = _deepspeed(setup.device)
        if setup.config.nvme_offload is not None and not self._deepspeed.ops.__compatible_ops__.get("async_io"):
            raise ConfigError(
                "--nvme-offload needs DeepSpeed's async_io, which cannot be built here; install libaio (Debian: "
                "libaio-dev) and a C++ compiler, or use --cpu-offload"
            )
        self._scaler = ZeroScaler() if setup.config.precision == "fp16" else None
        self._joined = False

    def wrap(self, module: nn.Module) -> PreparedModel:
        return ZeroModel(module, self.setup)

    def join(self, models: dict[str, PreparedModel], optimizers: list[PreparedOptimizer]) -> None:
        trained = [model for model in models.values() if any(optimizer.holds(model) for optimizer in optimizers)]
        if not optimizers:
            return  # models alone: teachers, or their optimizer comes with a later prepare, which will say so
        if self._joined or len(optimizers) != 1 or len(trained) != 1:
            raise ConfigError(
                f"--strategy {self.name} takes one model with one optimizer, both in one run.prepare(...); it got "
                f"{len(trained)} and {len(optimizers)}{' more' if self._joined else ''}: use ddp, fsdp or fsdp2"
            )
        kind = type(optimizers[0].optimizer)
        if kind.__module__.startswith("torch.") and kind.__name__ in _WHOLE_TENSOR_OPTIMIZERS:
            raise ConfigError(
                f"{kind.__name__} looks at whole tensors, and --strategy {self.name} gives it one long row of numbers; "
                "use an optimizer that treats each number by itself, as AdamW, or --strategy ddp"
            )
        if self.setup.config.deepspeed_config is not None:
            self._check_settings()
        (model,) = trained
        assert isinstance(model, ZeroModel)
        model.join(optimizers[0], self._config, self._deepspeed)
        if self._scaler is None:
            optimizers[0].route_steps(model.step)
        else:
            self._scaler.attach(model)
        self._joined = True

    def _check_settings(self) -> None:
        """Has DeepSpeed read them by themselves: what it says while it takes the model may be about anything."""
        try:
            self._deepspeed.runtime.config.DeepSpeedConfig(copy.deepcopy(self._config))
        except (AssertionError, AttributeError, TypeError, ValueError) as error:  # pydantic's are ValueErrors
            raise refusal(error) from error

    def gradient_scaler(self) -> Scaler | None:
        return self._scaler


class Zero1(Zero):
    name, stage = "zero1", 1


class Zero2(Zero):
    name, stage = "zero2", 2


class Zero3(Zero):
    name, stage = "zero3", 3
    collective_forward = True
