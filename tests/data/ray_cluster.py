"""A Ray cluster for tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def two_nodes() -> Iterator[None]:
    """Run a Ray cluster of two nodes on this machine, with a core each; RAY_ADDRESS names it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
        import ray
        from ray.cluster_utils import Cluster

        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        made.add_node(num_cpus=1)
        patch.setenv("RAY_ADDRESS", made.address)
        try:
            yield
        finally:
            ray.shutdown()
            made.shutdown()
