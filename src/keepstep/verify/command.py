"""`keepstep verify`, from its flags to its exit code."""

from __future__ import annotations

import random
import time
from typing import Any

from keepstep.config import Config
from keepstep.errors import ConfigError
from keepstep.job import Target, script_name, stamped
from keepstep.storage import Storage
from keepstep.verify.report import say
from keepstep.verify.verification import Options, Verification


def verify(settings: dict[str, Any], target: Target, options: Options) -> int:
    """Runs the script undisturbed and disturbed, compares, writes the certificate; 0 if the script is certified."""
    config = Config.from_settings(settings)
    _check(config, options)
    target.check()
    seed = options.faults_seed if options.faults_seed is not None else random.SystemRandom().randrange(1 << 32)
    stem = config.folder.name or script_name(target.what if target.is_script else target.what.partition(":")[2])
    name = stamped(f"verify-{stem}", time.time())
    return Verification(_workers_apart(settings, config), target, options, seed, name).run()


def _check(config: Config, options: Options) -> None:
    if options.kills < 1:
        raise ConfigError(f"--kills is {options.kills}; at least 1 is needed")
    if config.launch.nodes > 1 or config.launch.is_elastic:
        raise ConfigError(
            f"verify needs one number of workers, all on this machine; found --workers {config.launch.workers} "
            f"--nodes {config.launch.nodes}"
        )
    if Storage.parse(config.folder.storage).url is not None:
        raise ConfigError(f"--storage is {config.folder.storage}; verify keeps its runs in a folder of this machine")


def _workers_apart(settings: dict[str, Any], config: Config) -> dict[str, Any]:
    """Workers in processes of their own: killing one must not kill who supervises it."""
    if config.launch.resolved_engine != "inprocess":
        return settings
    if config.launch.engine == "inprocess":
        say("--engine inprocess cannot be killed and live: the worker runs under --engine torchrun instead")
    return {**settings, "engine": "torchrun"}
