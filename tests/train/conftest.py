"""Fixtures of training in several processes."""

import uuid

import pytest
import torch.distributed as dist

from tests.train.ranks import run_island


@pytest.fixture
def apart(pool):
    """Return a function that trains replicas, each a world of its own; it gives each rank's result."""
    stores = []

    def run(run_dir, values, replicas=2, size=1):
        stores.append(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
        mark = uuid.uuid4().hex
        return pool.run(run_island, replicas * size, run_dir, values, replicas, stores[-1].port, mark)

    return run
