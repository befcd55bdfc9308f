"""Codebooks that are learnt by moving averages, each for what those before it left over."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ResidualQuantizer(nn.Module):
    """Codebooks that each describe what those before left over; trained by moving averages, unused codes start anew.

    Where `first` is given, the first codes are what somebody else says they are: the first codebook then only learns
    what such frames have in common.
    """

    def __init__(self, num_quantizers: int, codebook_size: int, latent: int) -> None:
        super().__init__()
        self.register_buffer("codebooks", torch.randn(num_quantizers, codebook_size, latent))
        self.register_buffer("sizes", torch.ones(num_quantizers, codebook_size))
        self.register_buffer("sums", self.codebooks.clone())

    def encode(self, z: Tensor, first: Tensor | None = None) -> Tensor:
        """[n, latent] to [n, quantizers]."""
        codes, rest = [], z
        for number, codebook in enumerate(self.codebooks):
            nearest = _nearest(rest, codebook) if number or first is None else first
            codes.append(nearest)
            rest = rest - codebook[nearest]
        return torch.stack(codes, 1)

    def decode(self, codes: Tensor) -> Tensor:
        """[n, quantizers], or fewer, to [n, latent]."""
        return sum(self.codebooks[i][codes[:, i]] for i in range(codes.shape[1]))

    @torch.no_grad()
    def start(self, z: Tensor, first: Tensor | None = None) -> None:
        """Each codebook begins as some of what there is to describe."""
        rest = z
        for number, (codebook, size, total) in enumerate(zip(self.codebooks, self.sizes, self.sums, strict=True)):
            codebook.copy_(rest[torch.randint(len(rest), size.shape, device=z.device)])
            size.fill_(1.0)
            total.copy_(codebook)
            rest = rest - codebook[_nearest(rest, codebook) if number or first is None else first]

    @torch.no_grad()
    def learn(self, z: Tensor, first: Tensor | None = None, decay: float = 0.98) -> Tensor:
        """Moves every codebook towards what it was the nearest to; returns the codes."""
        codes, rest = [], z
        for i in range(len(self.codebooks)):
            codebook = self.codebooks[i]
            nearest = _nearest(rest, codebook) if i or first is None else first
            codes.append(nearest)
            counts = torch.zeros_like(self.sizes[i]).index_add(0, nearest, torch.ones_like(rest[:, 0]))
            totals = torch.zeros_like(codebook).index_add(0, nearest, rest)
            self.sizes[i].lerp_(counts, 1 - decay)
            self.sums[i].lerp_(totals, 1 - decay)
            # Without asking whether there are any: the answer would have to be waited for.
            dead = self.sizes[i] < 0.05
            drawn = rest[torch.randint(len(rest), dead.shape, device=z.device)]
            self.sizes[i].masked_fill_(dead, 1.0)
            self.sums[i].copy_(torch.where(dead[:, None], drawn, self.sums[i]))
            self.codebooks[i].copy_(self.sums[i] / self.sizes[i].clamp(min=1e-5)[:, None])
            rest = rest - codebook[nearest]
        return torch.stack(codes, 1)


def _nearest(vectors: Tensor, codebook: Tensor) -> Tensor:
    return (codebook.square().sum(1) - 2 * vectors @ codebook.T).argmin(1)
