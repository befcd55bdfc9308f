"""Which sinks there are, and what each needs. A new one is a file here and a line below (and in `config.SINKS`)."""

from __future__ import annotations

import importlib
import importlib.util
import os
import threading
from collections.abc import Callable, Iterable

from keepstep.errors import ConfigError
from keepstep.observe.sinks.base import About, Sink

_SINKS = {
    "tensorboard": ("to_tensorboard", "TensorBoard", "tensorboard"),
    "mlflow": ("to_mlflow", "MLflow", "mlflow"),
    "wandb": ("to_wandb", "WeightsAndBiases", "wandb"),
    "prometheus": ("to_prometheus", "Prometheus", "prometheus_client"),
}
"""Name → file, class, and the package that must be installed. The extra is called as the sink."""


_importing = threading.Lock()
"""Two threads that import packages with parts in common can get in each other's way."""


def check_installed(names: Iterable[str]) -> None:
    """Raises if a sink's package is not there."""
    for name in names:
        package = _SINKS[name][2]
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"--sinks {name} needs {package}, which is not installed: pip install 'keepstep[{name}]'")
        if name == "mlflow":
            _check_mlflow()


def _check_mlflow() -> None:
    """Raises where MLflow would keep the run in a database that mlflow-skinny has no access to."""
    if not os.environ.get("MLFLOW_TRACKING_URI") and importlib.util.find_spec("sqlalchemy") is None:
        raise ConfigError(
            "--sinks mlflow does not know where to: set MLFLOW_TRACKING_URI to a server, as http://127.0.0.1:5000, "
            "or pip install mlflow, which keeps runs in ./mlflow.db (mlflow-skinny, which is installed, cannot)"
        )


def load(name: str) -> Callable[[About], Sink]:
    """The sink's class; imports its package."""
    file, class_name, _ = _SINKS[name]
    with _importing:
        module = importlib.import_module(f"keepstep.observe.sinks.{file}")
    found: Callable[[About], Sink] = getattr(module, class_name)
    return found
