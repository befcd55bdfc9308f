"""A search as it was asked for: checked before anything is started, and compared when it is resumed."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from keepstep.config import Config, LaunchConfig, check_run_name, flag
from keepstep.errors import ConfigError
from keepstep.job import Target
from keepstep.tune.domain import Domain, Value
from keepstep.tune.space import as_arguments, num_combinations, parse_space, values_of

METHODS = ("asha", "pbt", "random", "grid")
_TRIALS = 10
_OF_RAY = ("address", "cpus_per_worker", "gpus_per_worker", "resources", "ship")
"""Settings of the search: a trial's workers live within what it reserved, and reserve nothing themselves."""
_OF_RUNS = ("name", "storage")


@dataclass(frozen=True)
class Options:
    """The flags of `keepstep tune` beyond those of `keepstep run`, as they were given."""

    space: Sequence[str]
    metric: str
    trials: int | None = None
    method: str = "asha"
    grace: int = 1
    resume: bool = False


@dataclass(frozen=True)
class Search:
    """What to search, how, and with what."""

    name: str
    storage: str
    space: tuple[Domain, ...]
    metric: str
    higher_is_better: bool
    method: str
    trials: int
    grace: int
    seed: int
    target: Target
    settings: dict[str, Any]
    """Of every trial's run."""
    launch: LaunchConfig
    """Of a trial's workers, with what Ray is to reserve for each."""
    device: str

    @classmethod
    def of(cls, settings: dict[str, Any], target: Target, options: Options, name: str) -> Search:
        """Raises if it cannot work."""
        if settings.get("engine") == "ray":
            raise ConfigError(
                "--engine ray would reserve a trial's workers a second time; leave it out: trials run on Ray anyway"
            )
        config = Config.from_settings({**settings, "engine": "ray"})
        if config.launch.is_elastic or config.launch.nodes > 1:
            raise ConfigError(f"--workers {config.launch.workers}: a trial has a fixed number of workers, on one node")
        check_run_name(f"{name}-0000")
        space = parse_space(options.space)
        if options.method == "grid":
            space = tuple(_listed(domain) for domain in space)
        metric, higher_is_better = _metric(options.metric)
        if options.grace < 1:
            raise ConfigError(f"--grace is {options.grace}; a trial must report at least once before it is judged")
        _check_method(options.method, settings)
        of_trials = {key: value for key, value in settings.items() if key not in (*_OF_RAY, *_OF_RUNS)}
        Config.from_settings(of_trials)
        return cls(
            name=name,
            storage=config.folder.storage,
            space=space,
            metric=metric,
            higher_is_better=higher_is_better,
            method=options.method,
            trials=_trials(options, space),
            grace=options.grace,
            seed=config.folder.seed,
            target=target,
            settings=of_trials,
            launch=config.launch,
            device=config.strategy.device,
        )

    def run_name(self, number: int) -> str:
        return f"{self.name}-{number:04d}"

    def values(self, number: int) -> dict[str, Value]:
        return values_of(self.space, self.seed, number)

    def words(self, run: str, storage: str, target: Target, values: dict[str, Value]) -> list[str]:
        """`keepstep`'s words for a run with these values."""
        words = ["run", "--name", run, "--storage", storage]
        for name, value in self.settings.items():
            words += [flag(name)] if value is True else [flag(name), str(value)]
        return [*words, target.what, *target.arguments, *as_arguments(values)]

    def best_command(self, values: dict[str, Value]) -> str:
        """What to type to train with these values from the start."""
        return shlex.join(["keepstep", *self.words(f"{self.name}-best", self.storage, self.target, values)])

    def described(self) -> dict[str, Any]:
        """For tune.json: what must be the same when the search is resumed."""
        return {
            "space": [str(domain) for domain in self.space],
            "metric": f"{self.metric}:{'max' if self.higher_is_better else 'min'}",
            "method": self.method,
            "grace": self.grace,
            "seed": self.seed,
            "script": self.target.what,
            "arguments": list(self.target.arguments),
            "settings": self.settings,
        }


def _metric(text: str) -> tuple[str, bool]:
    metric, _, order = text.rpartition(":")
    if not metric or order not in ("max", "min"):
        raise ConfigError(f"--metric is {text!r}; give METRIC:max or METRIC:min, as accuracy:max")
    return metric, order == "max"


def _listed(domain: Domain) -> Domain:
    if not domain.is_list:
        raise ConfigError(
            f"--method grid tries every combination; {domain.name} is {domain.kind}(...): list its values, as "
            f"{domain.name}=grid(0.1,0.2), or choose --method random"
        )
    return dataclasses.replace(domain, kind="grid")


def _trials(options: Options, space: tuple[Domain, ...]) -> int:
    combinations = num_combinations(space)
    has_grid = any(domain.kind == "grid" for domain in space)
    trials = options.trials if options.trials is not None else (combinations if has_grid else _TRIALS)
    if trials < 1:
        raise ConfigError(f"--trials is {trials}; at least 1 is needed")
    if options.method == "grid" and trials > combinations:
        raise ConfigError(f"--trials is {trials}; the grid has {combinations} combinations: leave it out to try all")
    if options.method == "pbt" and trials < 2:
        raise ConfigError("--method pbt lets trials learn from each other; --trials must be at least 2")
    return trials


def _check_method(method: str, settings: dict[str, Any]) -> None:
    if method not in METHODS:
        raise ConfigError(f"--method is {method!r}; choose one of {', '.join(METHODS)}")
    if method != "pbt":
        return
    if "checkpoint_every" not in settings:
        raise ConfigError(
            "--method pbt copies a good trial's newest checkpoint; give --checkpoint-every, as the steps of an epoch"
        )
    if "://" in settings.get("storage", ""):
        raise ConfigError("--method pbt copies checkpoints between folders; --storage must be one, not an object store")
