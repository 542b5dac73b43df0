"""Fixtures of training in several processes."""

import uuid

import pytest
import torch.distributed as dist

from shoal.config.load import validate
from shoal.models.init import build_decoder
from shoal.models.shape import resolve_shape
from tests.train.ranks import run_replica_group, tiny_config


@pytest.fixture
def model():
    """A tiny decoder."""
    values = validate(tiny_config("data"), "test").model.model_copy(update={"vocab_size": 257})
    return build_decoder(resolve_shape(values, 257), 1, "cpu")


@pytest.fixture
def apart(pool):
    """Return a function that trains replicas, each a world of its own; it gives each rank's result."""
    stores = []

    def run(run_dir, values, replicas=2, size=1):
        stores.append(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
        mark = uuid.uuid4().hex
        return pool.run(run_replica_group, replicas * size, run_dir, values, replicas, stores[-1].port, mark)

    return run
