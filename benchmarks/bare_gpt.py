"""A GPT-2 in bare torch, of the kind that short training scripts hold: no framework, nothing tuned."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.o = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_btd: Tensor) -> Tensor:
        parts = self.qkv(self.norm1(x_btd)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        y_btd = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x_btd = x_btd + self.o(y_btd)
        return x_btd + self.down(F.gelu(self.up(self.norm2(x_btd)), approximate="tanh"))


class Gpt(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, vocab_size: int, positions: int) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(vocab_size, width), nn.Embedding(positions, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for table in (self.embed, self.places):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens_bt: Tensor, targets_bt: Tensor) -> Tensor:
        """Return the mean loss."""
        x_btd = self.embed(tokens_bt) + self.places(torch.arange(tokens_bt.shape[1], device=tokens_bt.device))
        logits_btv = F.linear(self.norm(self.blocks(x_btd)), self.embed.weight)
        return F.cross_entropy(logits_btv.flatten(0, 1), targets_bt.flatten())
