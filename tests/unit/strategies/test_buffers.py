"""Buffers are sent where they changed, and only there."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from keepstep.strategies import buffers
from keepstep.strategies.buffers import BufferSync


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What was broadcast; every value that arrives is rank 0's, which says 7."""
    tensors: list[torch.Tensor] = []

    def broadcast(group: object, sent: list[torch.Tensor], piece_bytes: int, src: int) -> None:
        assert group == "all workers" and sent and src == 0
        tensors.extend(sent)
        for tensor in sent:
            tensor.fill_(7)

    monkeypatch.setattr(buffers, "_broadcast_coalesced", broadcast)
    monkeypatch.setattr(buffers, "_get_default_group", lambda: "all workers")
    return tensors


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(2, 2), nn.BatchNorm1d(2)
        self.register_buffer("mask", torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.norm(self.linear(x)) * self.mask
        return output


def test_statistics_that_moved_are_replaced_by_rank_0s(sent: list[torch.Tensor]) -> None:
    model = Masked()
    sync = BufferSync(model, world_size=2)
    model(torch.randn(4, 2))
    sync.sync()
    assert len(sent) == 3
    assert model.norm.running_mean is not None and model.norm.running_mean.tolist() == [7.0, 7.0]
    assert model.norm.num_batches_tracked is not None and model.norm.num_batches_tracked.item() == 7
    assert model.mask.tolist() == [1.0, 1.0]


def test_nothing_is_sent_where_nothing_changed(sent: list[torch.Tensor]) -> None:
    model = Masked()
    sync = BufferSync(model, world_size=2)
    sync.sync()
    model.eval()
    model(torch.randn(4, 2))
    sync.sync()
    assert sent == []
    model.train()
    model(torch.randn(4, 2))
    sync.sync()
    sync.sync()
    assert len(sent) == 3, "sent once, not again"


def test_a_buffer_that_was_replaced_is_sent(sent: list[torch.Tensor]) -> None:
    model = Masked()
    sync = BufferSync(model, world_size=2)
    model.mask = torch.zeros(2)
    sync.sync()
    assert len(sent) == 1
    assert model.mask.tolist() == [7.0, 7.0]


def test_a_buffer_of_the_model_itself_is_seen(sent: list[torch.Tensor]) -> None:
    model = Masked()
    sync = BufferSync(model, world_size=2)
    model.mask.mul_(0)
    sync.sync()
    assert len(sent) == 1


def test_one_worker_sends_nothing(sent: list[torch.Tensor]) -> None:
    model = Masked()
    sync = BufferSync(model, world_size=1)
    model(torch.randn(4, 2))
    sync.sync()
    assert sent == []


def test_a_model_without_buffers_sends_nothing(sent: list[torch.Tensor]) -> None:
    sync = BufferSync(nn.Linear(2, 2), world_size=2)
    sync.sync()
    assert sent == []


def test_sending_needs_no_gradient(sent: list[torch.Tensor]) -> None:
    """A buffer that takes part in a graph may be written between steps."""
    model = Masked()
    sync = BufferSync(model, world_size=2)
    model.mask.add_(1)
    with torch.enable_grad():
        sync.sync()
    assert not model.mask.requires_grad
