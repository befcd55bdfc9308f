"""keepstep: write the PyTorch training loop once, run it anywhere, and lose nothing when a worker dies."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keepstep.current import start
    from keepstep.data.fetcher import sample_uniforms
    from keepstep.data.plan import Plan
    from keepstep.data.ray_data import RayData
    from keepstep.errors import KeepstepError
    from keepstep.launcher import launch
    from keepstep.run import Run

__version__ = "0.1.0"

__all__ = ["KeepstepError", "Plan", "RayData", "Run", "__version__", "launch", "sample_uniforms", "start"]

_HOMES = {
    "KeepstepError": "errors",
    "Plan": "data.plan",
    "RayData": "data.ray_data",
    "Run": "run",
    "launch": "launcher",
    "sample_uniforms": "data.fetcher",
    "start": "current",
}


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used: `keepstep show` need not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'keepstep' has no attribute {name!r}")
    value = getattr(import_module(f"keepstep.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
