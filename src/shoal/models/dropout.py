"""Dropout as a pure function of a key, so that no layout, recompute or resume changes a mask.

A mask bit depends on the sample's key, the site and the element's place within the sample, on nothing else.
Bits come from a counter-based integer hash: the mixed place, xor one key word, times the other made odd, and
mixed again (constants of "lowbias32", C. Wellons, Hash Function Prospector). One 32-bit word serves two
elements, 16 bits each, which halves the cost; p is rounded to 1/65536 and the scale follows the rounded p, so
the expectation is exact.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

_LEVELS = 1 << 16
_MUL_1, _MUL_2 = 0x21F0AAAD, 0x735A2D97
_SPLITMIX_1, _SPLITMIX_2 = (
    -0x40A7B892E31B1A47,
    -0x6B2FB644ECCEEE15,
)  # splitmix64's constants as signed integers


def site_id(name: str) -> int:
    """Return the signed 64-bit number of a dropout site ("blocks.3.attention")."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little", signed=True)


def keyed_dropout(x: Tensor, p: float, keys_b: Tensor, site: int | Tensor, part: int = 0) -> Tensor:
    """Drop elements of `x` [batch, ...] with probability `p` and scale the rest by 1 / (1 - p).

    `keys_b` int64 [batch] names the samples; `site` comes from `site_id`, as it is or as an int64
    tensor of no dimensions. Same key, site and place in the sample give the same bit on every device. Where
    `x` is one of several equal parts of each sample, one after the other, `part` says which.
    """
    dropped_levels = round(p * _LEVELS)
    if dropped_levels == 0:
        return x
    size = x[0].numel()
    dropped = _hash_halves(keys_b ^ site, part * size, size) < dropped_levels - _LEVELS // 2
    return x.masked_fill(dropped.view_as(x), 0.0).mul_(_LEVELS / (_LEVELS - dropped_levels))


def _hash_halves(keys_b: Tensor, first: int, num_elements: int) -> Tensor:
    """Return uniform int16 [batch, num_elements] for the places from `first` on."""
    keys_b = _mix_64(keys_b)
    low_b1 = keys_b.to(torch.int32).unsqueeze(1)
    odd_b1 = (keys_b >> 32).to(torch.int32).unsqueeze(1) | 1
    skipped = first % 2
    words = range(first // 2, -(-(first + num_elements) // 2))
    index_w = torch.arange(words.start, words.stop, dtype=torch.int32, device=keys_b.device)
    bits_bw = _mix_32(index_w) ^ low_b1
    bits_bw.mul_(odd_b1)
    _mix_32(bits_bw)
    halves = bits_bw.view(torch.int16)
    return halves if halves.shape[1] == num_elements else halves[:, skipped : skipped + num_elements]


def _mix_32(x: Tensor) -> Tensor:
    """Mix int32 words in place; `>>` is arithmetic in torch, so the sign's copies are masked away."""
    shifted = torch.empty_like(x)
    for shift, factor in ((16, _MUL_1), (15, _MUL_2), (15, 1)):
        torch.bitwise_right_shift(x, shift, out=shifted)
        x ^= shifted.bitwise_and_((1 << (32 - shift)) - 1)
        if factor != 1:
            x *= factor
    return x


def _mix_64(keys_b: Tensor) -> Tensor:
    """Return splitmix64's finaliser of the keys, int64 [batch]."""
    for shift, factor in ((30, _SPLITMIX_1), (27, _SPLITMIX_2)):
        keys_b = (keys_b ^ ((keys_b >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return keys_b ^ ((keys_b >> 31) & ((1 << 33) - 1))
