"""Keys and values of the tokens seen so far, for generation one token at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.models.shape import ModelShape


class KVCache:
    """Hold keys and values of a batch whose rows end at the same column; shorter rows begin with padding.

    `starts_b` is the number of padding columns at the left of each row; they are never attended to. Shapes:
    keys and values [batch, kv_heads, capacity, head_dim] for each layer.
    """

    def __init__(
        self, shape: ModelShape, starts_b: Tensor, capacity: int, dtype: torch.dtype, head_parts: int = 1
    ) -> None:
        """Make room for `capacity` columns; of the heads, for one of `head_parts` equal parts."""
        heads = shape.n_kv_heads // head_parts
        size = (shape.n_layers, len(starts_b), heads, capacity, shape.head_dim)
        self.keys = torch.zeros(size, dtype=dtype, device=starts_b.device)
        self.values = torch.zeros_like(self.keys)
        self.starts_b = starts_b
        self.length = 0
        self._count_padding()

    def longest(self, num_new: int) -> int:
        """Return the tokens of the longest row once `num_new` are added."""
        return self.length + num_new - self._first_start

    def positions(self, num_new: int) -> Tensor:
        """Return the position of each new token in its own row, [batch, num_new]; 0 at padding."""
        columns = torch.arange(self.length, self.length + num_new, device=self.starts_b.device)
        return (columns - self.starts_b[:, None]).clamp_(min=0)

    def mask(self, num_new: int) -> Tensor | None:
        """Return which columns a new token may see, bool [batch, 1, num_new, columns]; None means causal.

        A padding token sees the padding before it, because a softmax over nothing would be NaN.
        """
        if not self._padded and (num_new == 1 or self.length == 0):
            return None
        total = self.length + num_new
        key = torch.arange(total, device=self.starts_b.device)
        query = key[self.length :, None]
        start = self.starts_b[:, None, None]
        return ((key <= query) & ((key >= start) | (query < start)))[:, None]

    def extend(self, layer: int, k_bhtd: Tensor, v_bhtd: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new keys and values of one layer and return all of that layer's so far."""
        end = self.length + k_bhtd.shape[2]
        self.keys[layer, :, :, self.length : end] = k_bhtd
        self.values[layer, :, :, self.length : end] = v_bhtd
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]

    def keep_rows(self, rows: Tensor) -> None:
        """Drop all rows of the batch but `rows`."""
        self.keys, self.values = self.keys[:, rows], self.values[:, rows]
        self.starts_b = self.starts_b[rows]
        self._count_padding()

    def _count_padding(self) -> None:
        """Keep on the host what would cost a device synchronisation a token."""
        self._first_start, last_start = int(self.starts_b.min()), int(self.starts_b.max())
        self._padded = last_start > 0
