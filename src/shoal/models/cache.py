"""Keys and values of the tokens seen so far, for sequences that begin and end independently of each other."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.models.shape import ModelShape


class KVCache:
    """Hold keys and values of some rows, each a sequence of its own length, which begins at column 0.

    Shapes: keys and values [layers, rows, kv_heads, capacity, head_dim].
    """

    def __init__(
        self,
        shape: ModelShape,
        rows: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        head_parts: int = 1,
    ) -> None:
        """Make room for `capacity` columns a row; of the heads, for one of `head_parts` equal parts."""
        size = (shape.n_layers, rows, shape.n_kv_heads // head_parts, capacity, shape.head_dim)
        self.keys = torch.zeros(size, dtype=dtype, device=device)  # not empty: 0 times NaN would be NaN
        self.values = torch.zeros_like(self.keys)
        self.layers = [(self.keys[n], self.values[n]) for n in range(shape.n_layers)]  # views, made once
        self.lengths = [0] * rows  # on the host: reading them must not wait for a device

    @staticmethod
    def num_bytes(shape: ModelShape, rows: int, capacity: int, head_parts: int = 1) -> int:
        """Return how much memory such a cache takes in fp32."""
        return 8 * shape.n_layers * rows * (shape.n_kv_heads // head_parts) * capacity * shape.head_dim

    def part(self, first: int, count: int) -> CachePart:
        """Return `count` rows from `first` on, to be given tokens in one forward pass."""
        return CachePart(self, first, count)

    def move(self, source: int, target: int) -> None:
        """Make row `target` what row `source` is."""
        used = self.lengths[source]
        for held in (self.keys, self.values):
            held[:, target, :, :used] = held[:, source, :, :used]
        self.lengths[target] = used


class CachePart:
    """Neighbouring rows of a cache in one forward pass: either of one length, or given one token each."""

    def __init__(self, cache: KVCache, first: int, count: int) -> None:
        self._cache = cache
        self._rows = slice(first, first + count)
        self._lengths = cache.lengths[self._rows]
        self._device = cache.keys.device
        self._alike = len(set(self._lengths)) == 1
        self._lengths_b = torch.tensor(self._lengths, device=self._device)
        self._numbers_b = torch.arange(count, device=self._device)

    def longest(self, num_new: int) -> int:
        """Return the tokens of the longest row once `num_new` are added."""
        return max(self._lengths) + num_new

    def positions(self, num_new: int) -> Tensor:
        """Return the position of each new token in its own row, [rows or 1, num_new]."""
        if self._alike:
            return torch.arange(self._lengths[0], self._lengths[0] + num_new, device=self._device)[None]
        assert num_new == 1, "rows of unequal length take one token each"
        return self._lengths_b[:, None]

    def mask(self, num_new: int) -> Tensor | None:
        """Return which columns a new token may see, bool [rows or 1, 1, time, columns]; None means causal."""
        if self._alike and (num_new == 1 or self._lengths[0] == 0):
            return None
        columns = torch.arange(self.longest(num_new), device=self._device)
        return (columns <= self.positions(num_new)[:, :, None])[:, None]

    def extend(self, layer: int, k_bhtc: Tensor, v_bhtc: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new keys and values of one layer and return all of that layer's so far."""
        end = self.longest(k_bhtc.shape[2])
        held = self._cache.layers[layer]
        for kept, new in zip(held, (k_bhtc, v_bhtc), strict=True):
            if self._alike:
                kept[self._rows, :, self._lengths[0] : end] = new
            else:
                kept[self._rows][self._numbers_b, :, self._lengths_b] = new[:, :, 0]
        keys, values = held
        return keys[self._rows, :, :end], values[self._rows, :, :end]

    def advance(self, num_new: int) -> None:
        """Count the new tokens, when all layers have stored theirs."""
        self._cache.lengths[self._rows] = [length + num_new for length in self._lengths]
