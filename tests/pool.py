"""Warm gloo workers for multi-process tests: started once, each call with a process group of its own.

def worker(value):                      # top-level, runs on every rank, its process group is set up
    return dist.get_rank() + value

def test_it(pool):
    assert pool.run(worker, 2, 10) == [10, 11]
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from typing import Any

from shoal.config.sections import Runtime
from shoal.errors import ShoalError
from shoal.worker_pool import WorkerPool

MAX_WORKERS = 8
_TORCH = ["torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp"]
PRELOADED = [*_TORCH, "shoal.train.job", "tests.warm"]


class RankError(AssertionError):
    """A rank failed; the message has its traceback, or where it hangs."""


class Pool:
    """Up to `MAX_WORKERS` worker processes with one thread each."""

    def __init__(self) -> None:
        self._workers = WorkerPool(Runtime(device="cpu", threads=1), PRELOADED)

    def run(self, fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60) -> list[Any]:
        """Return what `fn(*args)` returned on each of `world_size` ranks (results and args are pickled).

        `fn` is a top-level function; it asks torch.distributed for its rank. Any rank's exception, death or
        overrun of `timeout` seconds (start-up of new workers not counted) is a RankError.
        """
        assert 1 <= world_size <= MAX_WORKERS, world_size
        call = pickle.dumps((fn, args))
        try:
            return self._workers.run(
                fn.__name__, lambda word: None, world_size, _call, list(sys.path), call, timeout_s=timeout
            )
        except ShoalError as error:
            raise RankError(str(error)) from error

    def close(self) -> None:
        self._workers.__exit__(None, None, None)


def _call(process: Any, tell: Any, path: list[str], call: bytes) -> Any:
    """Run a call as a rank."""
    import torch

    sys.path[:] = path  # test modules without a package live in folders that pytest added later
    torch.manual_seed(0)
    fn, args = pickle.loads(call)
    return fn(*args)
