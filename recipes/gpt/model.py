"""A small GPT over bytes (pre-norm, learnt positions), written for one device."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256


class CausalAttention(nn.Module):
    def __init__(self, hidden: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        n, tokens, hidden = x.shape
        qkv = self.qkv(x).view(n, tokens, 3, self.num_heads, hidden // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        dropout = self.dropout if self.training else 0.0
        x = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        x = self.out(x.transpose(1, 2).reshape(n, tokens, hidden))
        return x


class Block(nn.Module):
    def __init__(self, hidden: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(hidden)
        self.attention = CausalAttention(hidden, num_heads, dropout)
        self.norm2 = nn.LayerNorm(hidden)
        self.expand = nn.Linear(hidden, 4 * hidden)
        self.out = nn.Linear(4 * hidden, hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        x = x + self.dropout(self.out(F.gelu(self.expand(self.norm2(x)))))
        return x


class GPT(nn.Module):
    def __init__(
        self, sequence: int = 128, num_layers: int = 4, num_heads: int = 4, hidden: int = 128, dropout: float = 0.1
    ) -> None:
        super().__init__()
        if hidden % num_heads:
            raise ValueError(f"{num_heads} heads must divide hidden {hidden}")
        self.tokens = nn.Embedding(VOCABULARY, hidden)
        self.positions = nn.Parameter(torch.empty(sequence, hidden))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(hidden, num_heads, dropout) for _ in range(num_layers))
        self.norm = nn.LayerNorm(hidden)
        # Not tied to the embedding: with 256 bytes it saves next to nothing, and sharded strategies dislike ties.
        self.head = nn.Linear(hidden, VOCABULARY, bias=False)
        self._init(num_layers)

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.dropout(self.tokens(tokens) + self.positions[: tokens.shape[1]])
        for block in self.blocks:
            x = block(x)
        x = self.head(self.norm(x))
        return x

    def _init(self, num_layers: int) -> None:
        for name, parameter in self.named_parameters():
            # GPT-2's: what is added to the residual stream shrinks with depth, so that its variance does not grow.
            std = 0.02 / math.sqrt(2 * num_layers) if name.endswith("out.weight") else 0.02
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=std)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
