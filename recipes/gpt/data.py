"""Windows of bytes from a text file or, so that nothing is downloaded, from Python's own standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

import keepstep
from keepstep.errors import DataError

Batch = tuple[Tensor, Tensor]


class RandomWindows(Dataset[Batch]):
    """Window i starts anywhere in the i-th of `num_windows` equal parts: each epoch draws anew, and covers the text."""

    def __init__(self, text: Tensor, sequence: int, num_windows: int) -> None:
        self.text, self.sequence, self.num_windows = text, sequence, num_windows

    def __len__(self) -> int:
        return self.num_windows

    def __getitems__(self, indices: list[int]) -> Batch:
        num_starts = len(self.text) - self.sequence
        # Drawn by keepstep from the seed, the epoch and the window's index: the same whichever worker asks.
        within = keepstep.sample_uniforms(1)[:, 0].double()
        starts = ((torch.as_tensor(indices) + within) * (num_starts / self.num_windows)).long()
        return cut(self.text, starts.clamp(max=num_starts - 1), self.sequence)

    def __getitem__(self, index: int) -> Batch:
        x, y = self.__getitems__([index])
        return x[0], y[0]


class TiledWindows(Dataset[Batch]):
    """Windows end to end, so that every byte is predicted once (but for a last piece shorter than a window)."""

    def __init__(self, text: Tensor, sequence: int) -> None:
        self.text, self.sequence = text, sequence

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.sequence

    def __getitems__(self, indices: list[int]) -> Batch:
        return cut(self.text, torch.as_tensor(indices) * self.sequence, self.sequence)

    def __getitem__(self, index: int) -> Batch:
        x, y = self.__getitems__([index])
        return x[0], y[0]


def cut(text: Tensor, starts: Tensor, sequence: int) -> Batch:
    """The windows at `starts` and, for each byte of them, the byte that follows: two int64 [n, sequence]."""
    tokens = text[starts[:, None] + torch.arange(sequence + 1)].long()
    return tokens[:, :-1], tokens[:, 1:]


def keep_batch(batch: Any) -> Any:
    """The collate function of a dataset whose `__getitems__` already returns a batch."""
    return batch


def load(
    file: str | None, max_bytes: int, sequence: int, num_windows: int, held_out: float
) -> tuple[RandomWindows, TiledWindows]:
    """`num_windows` training windows an epoch from the text's beginning, and the held-out share at its end."""
    text = read_file(file, max_bytes) if file else read_standard_library(max_bytes)
    num_held_out = int(len(text) * held_out)
    if min(num_held_out, len(text) - num_held_out) <= sequence:
        raise DataError(
            f"{file or 'the standard library'}: {len(text)} bytes, of which {num_held_out} are held out, are too few "
            f"for windows of {sequence}. Take a longer text or a shorter --sequence"
        )
    body, tail = text[:-num_held_out], text[-num_held_out:]
    return RandomWindows(body, sequence, num_windows), TiledWindows(tail, sequence)


def read_file(file: str, max_bytes: int) -> Tensor:
    try:
        with Path(file).open("rb") as stream:
            return _as_tensor(stream.read(max_bytes))
    except OSError as error:
        raise DataError(f"--text {file} cannot be read: {error}") from error


def read_standard_library(max_bytes: int) -> Tensor:
    """The modules at the top of this Python's standard library, by name: the same on every worker with this Python."""
    text = b""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= max_bytes:
            break
    return _as_tensor(text[:max_bytes])


def _as_tensor(text: bytes) -> Tensor:
    # torch.frombuffer refuses an empty buffer; load() says what is wrong with a text that short.
    return torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)
