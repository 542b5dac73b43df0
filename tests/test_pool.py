"""The pool of warm workers itself."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests.pool import Pool, RankError


def add_ranks(value):
    total = torch.tensor([float(dist.get_rank() + value)])
    dist.all_reduce(total)
    return total.item()


def fail_on_one():
    if dist.get_rank() == 1:
        raise ValueError("rank one is unhappy")
    dist.barrier()


def die_on_one():
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def hang():
    time.sleep(600)


def process_id():
    return os.getpid()


def test_results_come_back_in_rank_order_and_workers_stay_warm(pool: Pool):
    assert pool.run(add_ranks, 2, 10) == [21.0, 21.0]
    assert pool.run(process_id, 2) == pool.run(process_id, 2)
    assert pool.run(add_ranks, 4, 0) == [6.0] * 4


def test_failure_brings_the_traceback_and_the_pool_lives_on(pool: Pool):
    with pytest.raises(RankError, match="rank one is unhappy"):
        pool.run(fail_on_one, 2)
    assert pool.run(add_ranks, 2, 0) == [1.0, 1.0]


def test_dead_and_stuck_workers_are_replaced(pool: Pool):
    with pytest.raises(RankError, match=r"rank 1 was killed by signal 9"):
        pool.run(die_on_one, 2)
    with pytest.raises(RankError, match=r" in hang\n(.|\n)*hang: rank 0 said nothing for 0.5 s"):
        pool.run(hang, 1, timeout=0.5)
    assert pool.run(add_ranks, 2, 0) == [1.0, 1.0]
