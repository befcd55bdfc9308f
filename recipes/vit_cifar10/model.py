"""A pre-norm Vision Transformer, written for one device."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    def __init__(self, hidden: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        n, tokens, hidden = x.shape
        qkv = self.qkv(x).view(n, tokens, 3, self.num_heads, hidden // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        x = F.scaled_dot_product_attention(q, k, v)
        x = self.out(x.transpose(1, 2).reshape(n, tokens, hidden))
        return x


class Block(nn.Module):
    def __init__(self, hidden: int, num_heads: int, mlp: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(hidden)
        self.attention = Attention(hidden, num_heads)
        self.norm2 = nn.LayerNorm(hidden)
        self.mlp = nn.Sequential(nn.Linear(hidden, mlp), nn.GELU(), nn.Linear(mlp, hidden))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return x


class ViT(nn.Module):
    def __init__(
        self,
        image: int = 32,
        patch: int = 4,
        num_layers: int = 12,
        num_heads: int = 8,
        hidden: int = 384,
        mlp: int = 768,
        num_classes: int = 10,
    ) -> None:
        super().__init__()
        if image % patch or hidden % num_heads:
            raise ValueError(
                f"patch {patch} must divide image {image}, and {num_heads} heads must divide hidden {hidden}"
            )
        self.embed = nn.Conv2d(3, hidden, kernel_size=patch, stride=patch)
        self.positions = nn.Parameter(torch.empty(1, (image // patch) ** 2, hidden))
        self.blocks = nn.ModuleList(Block(hidden, num_heads, mlp) for _ in range(num_layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, num_classes)
        nn.init.trunc_normal_(self.positions, std=0.02)
        self.apply(_init_linear)

    def forward(self, images: Tensor) -> Tensor:
        x: Tensor = self.embed(images).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x)
        # Mean pooling in place of a class token keeps the number of tokens a power of two.
        x = self.head(self.norm(x).mean(1))
        return x


def _init_linear(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        nn.init.zeros_(module.bias)
