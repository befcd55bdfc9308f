"""Memory that batches are copied into: used again, and never while somebody has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from keepstep.data.ray_rows import Buffers

FLOAT = np.dtype(np.float32)


def test_memory_is_taken_again_once_nobody_has_it() -> None:
    buffers = Buffers(pin=False)
    first = buffers.empty("x", (4, 2), FLOAT)
    place = first.data_ptr()
    second = buffers.empty("x", (4, 2), FLOAT)
    assert second.data_ptr() != place
    del first
    assert buffers.empty("x", (4, 2), FLOAT).data_ptr() == place


WEIGHT = torch.ones(2, requires_grad=True)


@pytest.mark.parametrize(
    "keep",
    [lambda batch: batch[1:], lambda batch: batch.numpy(), lambda batch: (batch * WEIGHT).sum()],
    ids=["a view", "an array", "a graph"],
)
def test_what_is_made_of_a_batch_keeps_its_memory(keep: Callable[[torch.Tensor], Any]) -> None:
    buffers = Buffers(pin=False)

    def places() -> set[int]:
        return {tensor.data_ptr() for tensor in [buffers.empty("x", (4, 2), FLOAT) for _ in range(Buffers._MOST)]}

    batch = buffers.empty("x", (4, 2), FLOAT)
    place, held = batch.data_ptr(), keep(batch)
    del batch
    assert place not in places()
    del held
    assert place in places()


def test_only_so_many_are_kept_whatever_their_shapes() -> None:
    buffers = Buffers(pin=False)
    held = [buffers.empty("x", (rows, 2), FLOAT) for rows in range(1, 30)]
    assert len(buffers._made["x"]) == Buffers._MOST
    del held
    assert buffers.empty("x", (99, 2), FLOAT).shape == (99, 2)
    assert len(buffers._made["x"]) == 1


def test_what_no_tensor_can_hold_is_an_array() -> None:
    assert isinstance(Buffers(pin=False).empty("name", (3,), np.dtype("<U4")), np.ndarray)
