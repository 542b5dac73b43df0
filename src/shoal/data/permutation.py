"""A keyed permutation of range(n) that needs no memory: a Feistel network with cycle walking.

Source: Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002 (generalised Feistel, cycle walking).
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 6


def permute(index: NDArray[np.int64], size: int, *key: int | str) -> NDArray[np.int64]:
    """Map each index in [0, size) to its place in the permutation chosen by `key`."""
    if size <= 1:
        return np.zeros_like(index)
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half_bits) - 1)
    round_keys = _round_keys(*key)
    value = index.astype(np.uint64)
    pending = np.ones(len(value), dtype=bool)
    while pending.any():  # the network's domain is at most 4 size: a few walks on average
        value[pending] = _feistel(value[pending], round_keys, half_bits, mask)
        pending = value >= np.uint64(size)
    return value.astype(np.int64)


def _round_keys(*key: int | str) -> NDArray[np.uint64]:
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8 * _ROUNDS).digest()
    return np.frombuffer(digest, dtype="<u8")


def _feistel(
    value: NDArray[np.uint64], round_keys: NDArray[np.uint64], half_bits: int, mask: np.uint64
) -> NDArray[np.uint64]:
    left, right = value >> np.uint64(half_bits), value & mask
    for round_key in round_keys:
        left, right = right, left ^ (_mix(right, round_key) & mask)
    return (left << np.uint64(half_bits)) | right


def _mix(value: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
    """Scramble 64 bits under a key (constants of Stafford's variant 13 of the murmur3 finaliser)."""
    with np.errstate(over="ignore"):
        mixed = value ^ key
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return mixed ^ (mixed >> np.uint64(31))
