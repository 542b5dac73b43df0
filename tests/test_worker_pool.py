"""Warm processes that run as ranks: results by rank, and a sentence for one that fails."""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from shoal.config.sections import Runtime
from shoal.errors import ShoalError
from shoal.worker_pool import WorkerPool
from tests.parity import sabotage

PRELOAD = ("shoal.worker_pool",)


@pytest.fixture(scope="module")
def pool():
    with WorkerPool(Runtime(device="cpu", threads=1), PRELOAD, 3) as pool:
        yield pool


def test_each_call_takes_as_many_ranks_as_it_needs(pool):
    words = []
    assert pool.run("one", words.append, 1, sabotage.add_up, 10) == [10]
    assert pool.run("three", words.append, 3, sabotage.add_up, 10) == [33, 33, 33]
    assert words == ["adding", "adding"]


def use_a_mesh(process, tell):
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("one", "all"))
    whole = distribute_tensor(torch.ones(4), mesh, [Replicate(), Shard(0)]).full_tensor()
    assert whole.sum() == 4


def loops(process, tell):
    """Count the threads that listen for a process group's messages."""
    return [comm.read_text().strip() for comm in Path("/proc/self/task").glob("*/comm")].count(
        "gloo_tcp_loop"
    )


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_process_groups_end_with_their_call(pool):
    before = pool.run("count", print, 2, loops)
    assert min(before) > 0
    pool.run("mesh", print, 2, use_a_mesh)
    assert pool.run("count", print, 2, loops) == before


@pytest.mark.parametrize(
    ("deed", "sentence"),
    [
        (sabotage.fail, r"case: after a rehearsal, rank 1 failed: ValueError: a broken rank"),
        (sabotage.die, r"case: after a rehearsal, rank 1 was killed by signal 9 \(SIGKILL\)"),
        (sabotage.hang, r"case: rank 1 said nothing for 4 s since a rehearsal"),
    ],
)
def test_a_failed_rank_is_named(deed, sentence):
    runtime = Runtime(device="cpu", threads=1, timeout_s=4)
    with WorkerPool(runtime, PRELOAD, 2) as pool, pytest.raises(ShoalError, match=sentence) as caught:
        pool.run("case", lambda word: None, 2, deed)
    assert caught.value.exit_code == 1
