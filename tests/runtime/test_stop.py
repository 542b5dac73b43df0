"""A stop is asked of one rank and agreed by all, with its reason."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from shoal.config.sections import Runtime
from shoal.runtime.device import select_device
from shoal.runtime.process import form_groups
from shoal.runtime.rank_info import RankInfo
from shoal.runtime.startup import SIGNALS
from shoal.runtime.stop import STARTED, Stop


def _ask(run_dir: Path, how: str) -> tuple[bool, str]:
    """Ask the last rank alone to stop, in its own way; return what this rank finds."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    last = rank == world_size - 1
    runtime = Runtime(max_time_s=60, stop_after=3 if how == "--stop-after 3" else 0)
    os.environ[STARTED] = str(time.time() - (90 if last and how.startswith("the time") else 0))
    process = form_groups(
        RankInfo(rank, world_size, rank, world_size), select_device("cpu", rank, world_size), runtime
    )
    stop = Stop(process, run_dir, runtime, launched=False)
    before = {number: signal.getsignal(number) for number in SIGNALS}
    stop.listen()
    try:
        if last and how == "SIGTERM":
            os.kill(os.getpid(), signal.SIGTERM)
        return stop.requested(3 if last else 2), stop.reason
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        del os.environ[STARTED]


@pytest.mark.parametrize("how", ["the time limit of 60 s", "--stop-after 3", "SIGTERM"])
def test_every_rank_knows_why_one_rank_was_to_stop(pool, tmp_path, how):
    assert pool.run(_ask, 2, tmp_path, how) == [(True, how)] * 2


def test_nobody_stops_unasked(pool, tmp_path):
    assert pool.run(_ask, 2, tmp_path, "") == [(False, "")] * 2
