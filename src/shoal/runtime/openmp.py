"""How OpenMP's threads wait. Read by its library when torch is loaded, so it is set before that."""

from __future__ import annotations

import os

# How often a thread looks for work before it sleeps. By default, 300,000 times, two programs on the same
# cores wait most of their time for threads that are not running, while others look for work.
SPINS = "10000"


def sleep_sooner() -> None:
    """Have threads sleep when they found no work for a while, unless the user says how they wait."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
