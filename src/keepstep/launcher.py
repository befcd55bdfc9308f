"""`keepstep.launch`: what `keepstep run` does, for a function, from a script or a notebook."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle

from keepstep.config import Config
from keepstep.engines import Outcome
from keepstep.errors import RunFailed
from keepstep.failure import describe
from keepstep.job import PICKLED, Target
from keepstep.supervisor import Result, supervise


def launch(function: Callable[[], Any], **settings: Any) -> Result:
    """Runs `function` on the workers that the settings ask for, `launch(train, workers=4, strategy="fsdp2")`.

    The function calls `keepstep.start()` and trains; bind arguments with `functools.partial`. Settings are the flags
    of `keepstep run`, with underscores. Raises `RunFailed` when the workers fail for good.
    """
    if not callable(function):
        raise TypeError(f"launch takes a function, not a {type(function).__name__}")
    name = getattr(function, "__name__", "run").strip("<>")
    if Config.from_settings(settings).launch.resolved_engine == "inprocess":
        result = supervise(settings, Target(f"launch:{name}", function=function))
    else:
        with tempfile.TemporaryDirectory(prefix="keepstep-launch-") as folder:
            path = Path(folder) / f"launch:{name}{PICKLED}"
            path.write_bytes(cloudpickle.dumps(function))
            result = supervise(settings, Target(str(path)))
    if result.outcome is Outcome.FAILED:
        raise RunFailed(describe(result.failures))
    return result
