"""keepstep: write the PyTorch training loop once, run it anywhere, and lose nothing when a worker dies."""

from keepstep.current import start
from keepstep.data.fetcher import sample_uniforms
from keepstep.data.plan import Plan
from keepstep.errors import KeepstepError
from keepstep.launcher import launch
from keepstep.run import Run

__version__ = "0.1.0"

__all__ = ["KeepstepError", "Plan", "Run", "__version__", "launch", "sample_uniforms", "start"]
