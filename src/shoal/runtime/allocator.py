"""How this process gets memory for tensors on the CPU. Call before torch is imported."""

from __future__ import annotations

import ctypes
import os
import sys

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # malloc.h of the GNU C library
_LARGEST_INT = 2**31 - 1


def keep_memory() -> None:
    """Keep freed memory for the next tensor, and ask for huge pages.

    A training step frees and takes the same hundreds of megabytes every time. By default each large tensor is
    mapped anew and returned, and the kernel clears it page by page at first touch: a quarter of a step of a
    30M model, see docs/benchmarks.md. Nothing happens where the C library is another one.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # torch's own switch, read at its first allocation
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, _LARGEST_INT)
