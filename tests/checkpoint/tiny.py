"""The model that the checkpoints of the tests are of."""

from __future__ import annotations

from torch import nn


class Tiny(nn.Module):
    """The model whose tensors tests/checkpoint/ranks.py makes, with a tied copy of one."""

    def __init__(self, rows: int = 10) -> None:
        super().__init__()
        self.embed = nn.Embedding(rows, 4)
        self.up = nn.Linear(3, 7, bias=False)
        self.head = nn.Linear(4, rows, bias=False)
        self.head.weight = self.embed.weight
