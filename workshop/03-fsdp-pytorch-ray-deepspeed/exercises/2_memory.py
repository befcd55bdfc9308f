"""How many bytes does each GPU hold for weights, gradients and Adam's two moments?

`strategy` is "ddp", "zero1", "zero2" or "zero3". In fp32 a weight, a gradient and a moment take 4 bytes each. With
`mixed=True` weights and gradients take 2 bytes, and there is a copy of the weights in fp32 besides, which the
optimizer updates: it belongs to the optimizer state, and is divided with it.
"""

from __future__ import annotations


def bytes_per_gpu(num_parameters: int, num_gpus: int, strategy: str, mixed: bool = False) -> float:
    raise NotImplementedError


def gpus_needed(num_parameters: int, gpu_bytes: float, strategy: str, mixed: bool = False) -> int | None:
    """The smallest number of GPUs that can hold it, each with `gpu_bytes` for it; None: no number can."""
    raise NotImplementedError
