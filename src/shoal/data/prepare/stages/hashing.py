"""64-bit hashes of runs of values: polynomials modulo 2^64, which prefix sums give for all runs at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2^64


def powers(size: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Return the powers 1 to `size` of the base, and their inverses."""
    base, inverse = (np.full(size, value, np.uint64) for value in (_BASE, pow(_BASE, -1, 1 << 64)))
    return np.cumprod(base, dtype=np.uint64), np.cumprod(inverse, dtype=np.uint64)


def mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix the bits of each value in place, and return them: SplitMix64's finaliser (Steele and others, "Fast
    splittable pseudorandom number generators", 2014)."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        values ^= values >> np.uint64(shift)
        values *= np.uint64(factor)
    values ^= values >> np.uint64(31)
    return values
