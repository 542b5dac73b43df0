"""How this process gets memory for tensors on the CPU. Call before torch is imported."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from pathlib import Path

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # malloc.h of the GNU C library


def physical_memory() -> int:
    """Return the bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def available_memory() -> int:
    """Return the bytes that Linux could give a new program without swapping; elsewhere all there are."""
    file = Path("/proc/meminfo")
    found = re.search(r"MemAvailable:\s+(\d+) kB", file.read_text()) if file.exists() else None
    return int(found[1]) * 1024 if found else physical_memory()


def keep_memory() -> None:
    """Keep freed memory for the next tensor.

    A training step frees and takes the same hundreds of megabytes every time. By default each large tensor is
    mapped anew and returned, and the kernel clears it page by page at first touch: a quarter of a step of a
    30M model, see docs/LOG.md. Nothing happens where the C library is another one.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return
    libc.mallopt(_M_MMAP_MAX, 0)
    libc.mallopt(_M_TRIM_THRESHOLD, -1)  # never
