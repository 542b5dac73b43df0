"""What the tests of several modules share on a CUDA device."""

from __future__ import annotations

import os

import pytest

from shoal.config.sections import Runtime
from shoal.runtime import process as processes
from tests.tiny_dataset import random_dataset

# For tests of train.deterministic: torch reads it at the first matrix product of the process.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture(scope="module")
def group():
    """A process group of one rank, NCCL for CUDA tensors, for the module."""
    processes.join(Runtime(device="cuda", threads=1, timeout_s=60))
    yield
    processes.leave()


@pytest.fixture
def data(tmp_path):
    return random_dataset(tmp_path / "data")
