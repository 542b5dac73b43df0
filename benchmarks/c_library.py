"""What `shoal train` sets in the C library and OpenMP, and huge pages, as variables for any program.

Peers are timed as they come, and with these.
"""

from __future__ import annotations

import platform

from shoal.runtime.openmp import SPINS

WAITING = {"GOMP_SPINCOUNT": SPINS}
SETTINGS = {
    **WAITING,
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "100000000000",  # give nothing back
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",  # huge pages where the kernel gives them
}
SET = " with C library settings"  # behind a peer's name


def apply_here() -> bool:
    """Say whether the C library of this machine reads SETTINGS."""
    return platform.libc_ver()[0] == "glibc"
