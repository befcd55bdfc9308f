"""Every setting of a run: one frozen dataclass per concern, whose fields are the command line's flags."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any, TypeVar

from keepstep.errors import ConfigError

STRATEGIES = ("auto", "single", "ddp", "fsdp", "fsdp2", "zero1", "zero2", "zero3")
PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
ENGINES = ("auto", "inprocess", "torchrun", "ray")
DEVICES = ("auto", "cpu", "cuda")
SINKS = ("tensorboard", "mlflow", "wandb", "prometheus")

_DURATIONS_S = {"s": 1.0, "sec": 1.0, "min": 60.0, "h": 3600.0}

T = TypeVar("T")


def setting(default: Any, help: str, choices: tuple[str, ...] | None = None) -> Any:
    """A dataclass field that is also a flag: its help text stands where the field does."""
    return dataclasses.field(default=default, metadata={"help": help, "choices": choices})


@dataclass(frozen=True)
class LaunchConfig:
    """How workers are started, and how often a failure is forgiven."""

    workers: int | str = setting(1, "number of workers in all, over all nodes; ray: also 2:8, as there is room")
    engine: str = setting("auto", "what starts the workers; auto: inprocess for 1 worker, else torchrun", ENGINES)
    address: str | None = setting(None, "Ray cluster, as HOST:6379 or auto (default: RAY_ADDRESS, or one is started)")
    cpus_per_worker: float = setting(1.0, "CPUs that Ray reserves for each worker")
    gpus_per_worker: float | None = setting(None, "GPUs that Ray reserves for each worker (default: 1 if it has any)")
    resources: str | None = setting(None, "further Ray resources for each worker, as A100=1,fast_disk=0.5")
    ship: str | None = setting(None, "files and folders, beside the current one, that Ray brings to other nodes: a,b")
    nodes: int = setting(1, "number of machines; start the same command on each")
    node_rank: int = setting(0, "which of the machines this is, from 0")
    rendezvous: str | None = setting(None, "HOST:PORT of node 0, the same on every node")
    max_failures: int = setting(3, "failures forgiven before the run is given up")

    def __post_init__(self) -> None:
        if self.min_workers < 1:
            raise ConfigError(f"--workers is {self.workers}; at least 1 is needed")
        if self.min_workers > self.max_workers:
            raise ConfigError(f"--workers is {self.workers}; the lower number comes first")
        self._check_ray()
        if self.max_failures < 0:
            raise ConfigError(f"--max-failures is {self.max_failures}; 0 or more is needed")
        if self.nodes < 1 or not 0 <= self.node_rank < self.nodes:
            raise ConfigError(
                f"--node-rank {self.node_rank} with --nodes {self.nodes}: node ranks go from 0 to nodes - 1"
            )
        if self.nodes > 1 and not self.rendezvous:
            raise ConfigError(f"--nodes {self.nodes} needs --rendezvous HOST:PORT, an address of node 0 that all reach")
        if self.nodes == 1 and self.rendezvous:
            raise ConfigError(f"--rendezvous {self.rendezvous} is for several machines; add --nodes N")
        if self.max_workers % self.nodes:
            raise ConfigError(
                f"{self.workers} workers do not divide over {self.nodes} nodes; --workers counts all of them"
            )
        if self.engine == "inprocess" and self.max_workers > 1:
            raise ConfigError(f"--engine inprocess runs 1 worker, not {self.workers}; leave --engine out")

    def _check_ray(self) -> None:
        self.resources_per_worker  # noqa: B018  raises if it cannot be read
        for_ray = {
            "workers": self.is_elastic,
            "address": self.address is not None,
            "cpus_per_worker": self.cpus_per_worker != 1.0,
            "gpus_per_worker": self.gpus_per_worker is not None,
            "resources": self.resources is not None,
            "ship": self.ship is not None,
        }
        given = [name for name, is_given in for_ray.items() if is_given]
        if given and self.engine != "ray":
            raise ConfigError(f"{flag(given[0])} {getattr(self, given[0])} is for --engine ray; add it")
        if self.engine == "ray" and (self.nodes > 1 or self.rendezvous):
            raise ConfigError("--nodes and --rendezvous are torchrun's; Ray knows its nodes: leave them out")

    @property
    def is_elastic(self) -> bool:
        return isinstance(self.workers, str)

    @property
    def min_workers(self) -> int:
        return self._bounds()[0]

    @property
    def max_workers(self) -> int:
        return self._bounds()[1]

    def _bounds(self) -> tuple[int, int]:
        if isinstance(self.workers, int):
            return self.workers, self.workers
        match = re.fullmatch(r"(\d+):(\d+)", self.workers)
        if match is None:
            raise ConfigError(f"--workers is {self.workers!r}; give a number, as 4, or a range, as 2:8")
        return int(match[1]), int(match[2])

    @property
    def resources_per_worker(self) -> dict[str, float]:
        """What Ray reserves for a worker; without GPUs where they are to be looked for."""
        need = {"CPU": self.cpus_per_worker, "GPU": self.gpus_per_worker or 0.0}
        for entry in (self.resources or "").split(",") if self.resources else ():
            name, _, amount = entry.partition("=")
            if not re.fullmatch(r"\s*[A-Za-z_][\w:.-]*\s*", name) or not re.fullmatch(r"\s*\d+(\.\d+)?\s*", amount):
                raise ConfigError(f"--resources is {self.resources!r}; give NAME=AMOUNT, as A100=1,fast_disk=0.5")
            need[name.strip()] = float(amount)
        if any(amount < 0 for amount in need.values()):
            raise ConfigError("--cpus-per-worker and --gpus-per-worker must not be negative")
        return {name: amount for name, amount in need.items() if amount > 0}

    @property
    def workers_per_node(self) -> int:
        return self.max_workers // self.nodes

    @property
    def resolved_engine(self) -> str:
        if self.engine != "auto":
            return self.engine
        return "inprocess" if self.max_workers == 1 else "torchrun"


@dataclass(frozen=True)
class StrategyConfig:
    """How a model is spread over the workers, and in what arithmetic it runs."""

    strategy: str = setting("auto", "how the model is spread; auto: single for 1 worker, else ddp", STRATEGIES)
    precision: str = setting("fp32", "arithmetic of forward and backward; the optimizer keeps fp32 weights", PRECISIONS)
    compile: bool = setting(False, "compile the model with torch.compile")
    activation_checkpointing: bool = setting(False, "recompute each block in backward, to save memory")
    cpu_offload: bool = setting(False, "keep sharded weights and optimizer state in host memory (fsdp, fsdp2, zero)")
    nvme_offload: str | None = setting(None, "folder on a fast disk that holds the optimizer's state (zero3)")
    deepspeed_config: str | None = setting(None, "JSON file of further DeepSpeed settings (zero1, zero2, zero3)")
    device: str = setting("auto", "where to run; auto: cuda where there is a GPU", DEVICES)
    deterministic: bool = setting(False, "use only deterministic GPU kernels: bitwise resume on CUDA, some speed lost")

    def resolved_strategy(self, world_size: int) -> str:
        """The strategy by name, after checking that it can do what the other flags ask."""
        name = self.strategy if self.strategy != "auto" else ("single" if world_size == 1 else "ddp")
        if name == "single" and world_size > 1:
            raise ConfigError(f"--strategy single runs 1 worker, not {world_size}; use ddp, fsdp or fsdp2")
        if self.cpu_offload and name in ("single", "ddp"):
            raise ConfigError(
                f"--cpu-offload works with --strategy fsdp, fsdp2 or zero, not {name}, which shards nothing"
            )
        if self.nvme_offload is not None and name != "zero3":
            raise ConfigError(f"--nvme-offload works with --strategy zero3, not {name}")
        if self.nvme_offload is not None and self.cpu_offload:
            raise ConfigError("--nvme-offload and --cpu-offload ask for two places at once; give one of them")
        if self.deepspeed_config is not None and not name.startswith("zero"):
            raise ConfigError(f"--deepspeed-config works with --strategy zero1, zero2 or zero3, not {name}")
        return name


@dataclass(frozen=True)
class CheckpointConfig:
    """When the run is saved, how, and which saves are kept."""

    checkpoint_every: str = setting("5min", "steps (500) or time (90s, 10min, 1h) between checkpoints")
    checkpoint_mode: str = setting("async", "async: write while training goes on; sync: wait", ("async", "sync"))
    keep: int = setting(3, "newest checkpoints to keep")
    keep_best: str | None = setting(None, "METRIC:max or METRIC:min, also keep the checkpoint with the best value")

    def __post_init__(self) -> None:
        self.interval()
        self.best()
        if self.keep < 1:
            raise ConfigError(f"--keep is {self.keep}; at least 1 checkpoint must be kept to resume from")

    def interval(self) -> tuple[int | None, float | None]:
        """(steps, seconds): exactly one of them is set."""
        text = str(self.checkpoint_every).strip()
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text)
        if match and not match[2] and match[1].isdigit() and int(match[1]) > 0:
            return int(match[1]), None
        if match and match[2] in _DURATIONS_S and float(match[1]) > 0:
            return None, float(match[1]) * _DURATIONS_S[match[2]]
        raise ConfigError(f"--checkpoint-every is {text!r}; give steps, as 500, or a time, as 90s, 10min or 1h")

    def best(self) -> tuple[str, bool] | None:
        """(metric, higher is better), or None."""
        if self.keep_best is None:
            return None
        metric, _, order = self.keep_best.partition(":")
        if not metric or order not in ("max", "min"):
            raise ConfigError(f"--keep-best is {self.keep_best!r}; give METRIC:max or METRIC:min, as accuracy:max")
        return metric, order == "max"


@dataclass(frozen=True)
class FolderConfig:
    """Which run this is, and where it lives."""

    name: str | None = setting(None, "name of the run; the same name again resumes it (default: script and time)")
    storage: str = setting("runs", "folder that holds the run folders, or s3://bucket/folder")
    seed: int = setting(0, "seed of weights, data order and augmentation")

    def __post_init__(self) -> None:
        if self.name is not None:
            check_run_name(self.name)


@dataclass(frozen=True)
class ObserveConfig:
    """What is watched while a run goes on, and what is shown of it, and where."""

    sinks: str | None = setting(
        None, "also send metrics to: tensorboard, mlflow, wandb, prometheus[:PORT]; several with commas"
    )

    hang_timeout: float = setting(60.0, "seconds without a sign of life before workers count as hung; 0: never")

    def __post_init__(self) -> None:
        self.destinations()
        if self.hang_timeout < 0:
            raise ConfigError(f"--hang-timeout is {self.hang_timeout:g}; give seconds, or 0 for never")

    def destinations(self) -> dict[str, int | None]:
        """Sink → the port that was given with it."""
        found: dict[str, int | None] = {}
        for entry in (self.sinks or "").split(",") if self.sinks is not None else ():
            name, has_port, port = entry.strip().partition(":")
            if name not in SINKS:
                raise ConfigError(f"--sinks is {self.sinks!r}; choose among {', '.join(SINKS)}, several with commas")
            if name in found:
                raise ConfigError(f"--sinks is {self.sinks!r}; {name} stands there twice")
            if has_port and (name != "prometheus" or not re.fullmatch(r"\d{1,5}", port) or not 0 < int(port) < 65536):
                raise ConfigError(
                    f"--sinks has {entry.strip()!r}; a port, 1 to 65535, goes with prometheus, as prometheus:9000"
                )
            found[name] = int(port) if has_port else None
        return found


@dataclass(frozen=True)
class Config:
    """All settings of a run. One JSON value of those set by hand carries it to the workers."""

    launch: LaunchConfig = LaunchConfig()
    strategy: StrategyConfig = StrategyConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    folder: FolderConfig = FolderConfig()
    observe: ObserveConfig = ObserveConfig()

    @classmethod
    def from_settings(cls, settings: dict[str, Any]) -> Config:
        """Builds it from flat names (`workers=4, precision="bf16"`); an unknown name is an error."""
        unknown = sorted(set(settings) - set(SETTINGS))
        if unknown:
            raise ConfigError(f"unknown setting {', '.join(unknown)}; known: {', '.join(SETTINGS)}")
        parts = {part.name: _build(_part_type(part), settings) for part in dataclasses.fields(cls)}
        return cls(**parts)

    def flat(self) -> dict[str, Any]:
        """Every setting by its flat name."""
        return {k: v for part in dataclasses.asdict(self).values() for k, v in part.items()}


def _part_type(part: dataclasses.Field[Any]) -> type[Any]:
    return type(part.default)


def _build(part: type[T], settings: dict[str, Any]) -> T:
    fields = {f.name: f for f in dataclasses.fields(part)}  # type: ignore[arg-type]
    chosen = {name: value for name, value in settings.items() if name in fields}
    for name, value in chosen.items():
        _check_type(name, value, fields[name].default)
        choices = fields[name].metadata["choices"]
        if choices and value not in choices:
            raise ConfigError(f"{flag(name)} is {value!r}; choose one of {', '.join(choices)}")
    return part(**chosen)


def _check_type(name: str, value: Any, default: Any) -> None:
    """Settings come from Python, too: `workers="4"` or `compile="false"` must not be taken for something else."""
    wanted = str if default is None else type(default)
    also = {
        "checkpoint_every": (int,),
        "workers": (str,),
        "cpus_per_worker": (int,),
        "hang_timeout": (int,),
        "gpus_per_worker": (int, float),
    }
    if type(value) in also.get(name, ()):
        return
    if not (value is None and default is None) and type(value) is not wanted:
        raise ConfigError(f"{flag(name)} is {value!r}, a {type(value).__name__}; a {wanted.__name__} is needed")


def flag(name: str) -> str:
    """`max_failures` → `--max-failures`."""
    return "--" + name.replace("_", "-")


def check_run_name(name: str) -> None:
    """A run's name is a folder's name: anything that could leave the storage folder is refused."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", name):
        raise ConfigError(
            f"run name {name!r} is not a plain name; use letters, digits, '.', '_' and '-' only "
            "(where runs are kept is --storage)"
        )


SETTINGS: dict[str, dataclasses.Field[Any]] = {
    f.name: f for part in dataclasses.fields(Config) for f in dataclasses.fields(_part_type(part))
}
"""Flat name → field, over all parts."""
