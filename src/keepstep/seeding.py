"""Random number generators: seeded once, captured and put back, and one stream of its own for every sample."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from keepstep.errors import CheckpointError

_MASK = (1 << 64) - 1
_TWISTER_WORDS = 624
Words = npt.NDArray[np.uint64]


def mix(*words: int) -> int:
    """Hashes integers to 64 bits: the key of a stream that depends on all of them and on nothing else."""
    state = 0x9E3779B97F4A7C15
    for word in words:
        state = _splitmix(state ^ (word & _MASK))
    return state


def _splitmix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def mix_array(key: int, words: Words) -> Words:
    """`mix(key, word)`-like for a whole array at once: one independent 64-bit word an element."""
    x = words ^ np.uint64(key & _MASK)
    x += np.uint64(0x9E3779B97F4A7C15)
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def seed_everything(seed: int) -> None:
    """Seeds Python, NumPy and torch (CPU and every GPU)."""
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    torch.manual_seed(seed)


def seed_sample(key: int) -> None:
    """Seeds the CPU generators for one sample. Called per sample, so it leaves the GPUs' alone and stays cheap."""
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    torch.default_generator.manual_seed(key & (_MASK >> 1))


def capture_rng() -> dict[str, Any]:
    """The state of every generator of this process, as plain values and tensors."""
    version, words, gauss = random.getstate()
    algorithm, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
        "numpy": {
            "algorithm": str(algorithm),
            "keys": torch.from_numpy(np.asarray(keys).astype(np.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        # One worker drives one GPU, so the current device's generator is the only one that moves.
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_rng(state: dict[str, Any]) -> None:
    """Puts back what `capture_rng` took; raises if it did not come from there."""
    try:
        _restore_rng(state)
    except Exception as error:  # whatever three libraries make of a state that is not theirs
        raise CheckpointError(f"the saved random number generators cannot be put back: {error!r}") from None


def _restore_rng(state: dict[str, Any]) -> None:
    python, numpy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    keys = numpy["keys"].numpy().astype(np.uint32)
    # NumPy does not look at all, and torch not closely: they would read whatever lies behind their words in memory.
    if len(keys) != _TWISTER_WORDS or not 0 <= numpy["position"] <= _TWISTER_WORDS:
        raise ValueError(f"NumPy's position is {numpy['position']} of {len(keys)} words")
    left, _, position = struct.unpack_from("=iiQ", state["torch"].numpy().tobytes(), 8)
    if position + left > _TWISTER_WORDS + 1:
        raise ValueError(f"torch's position is {position}, with {left} words left")
    np.random.set_state((numpy["algorithm"], keys, numpy["position"], numpy["has_gauss"], numpy["cached"]))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


@contextmanager
def preserved_cpu_rng() -> Iterator[None]:
    """Whatever happens inside, the process's CPU generators go on afterwards as if it had not."""
    python, numpy, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(torch_state)
