"""Warm gloo workers for multi-process tests: start once, give every call a new process group.

They are forked from a server that has imported torch, before it has any threads: the first costs seconds, the
replacement of a dead one a tenth of a second.

def worker(value):                      # top-level, runs on every rank, its process group is set up
    return dist.get_rank() + value

def test_it(pool):
    assert pool.run(worker, 2, 10) == [10, 11]
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

MAX_WORKERS = 8
PRELOADED = ["torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp", "shoal.train.job"]
GRACE_S = 15.0  # what the peers of a failed rank get to notice it, before they are replaced


class RankError(AssertionError):
    """One or more ranks failed; the message holds each one's traceback."""


def process_context() -> Any:
    """Return how test processes are started: forked after torch's import where fork is safe."""
    context = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
    context.set_forkserver_preload(PRELOADED)
    return context


class Worker:
    """One warm process and the pipe to it."""

    def __init__(self, port: int) -> None:
        context = process_context()
        self.pipe, theirs = context.Pipe()
        handle, self._stacks = tempfile.mkstemp(prefix="shoal-pool-")
        os.close(handle)
        self.process = context.Process(target=_serve, args=(theirs, port, self._stacks), daemon=True)
        self.process.start()
        theirs.close()

    def stacks(self) -> str:
        """Return what each thread does now."""
        os.kill(self.process.pid, signal.SIGUSR1)
        time.sleep(0.5)
        return Path(self._stacks).read_text()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()
        Path(self._stacks).unlink()


class Pool:
    """Up to `MAX_WORKERS` worker processes, started when first needed and replaced when stuck or dead."""

    def __init__(self) -> None:
        from torch.distributed import TCPStore

        self._workers: list[Worker] = []
        self._calls = 0
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def run(self, fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60) -> list[Any]:
        """Return what `fn(*args)` returned on each of `world_size` ranks (results and args are pickled).

        `fn` is a top-level function; it asks torch.distributed for its rank. Any rank's exception, death or
        overrun of `timeout` seconds (start-up of new workers not counted) is a RankError.
        """
        assert 1 <= world_size <= MAX_WORKERS, world_size
        while len(self._workers) < world_size:
            self._workers.append(Worker(self._store.port))
        team = self._workers[:world_size]
        for worker in team:
            if not worker.pipe.poll(120):
                raise RankError("a pool worker did not start in 120 s")
            assert worker.pipe.recv_bytes() == b"ready"
        self._calls += 1
        for rank, worker in enumerate(team):
            job = (fn, args, rank, world_size, f"call{self._calls}", timeout)
            worker.pipe.send_bytes(pickle.dumps((list(sys.path), pickle.dumps(job))))
        answers = self._collect(team, timeout)
        failed = [f"--- rank {rank}: {answer[1]}" for rank, answer in enumerate(answers) if not answer[0]]
        if failed:
            self._replace(team)
            raise RankError(
                f"{len(failed)} of {world_size} ranks failed in {fn.__name__}\n" + "\n".join(failed)
            )
        return [answer[1] for answer in answers]

    def _collect(self, team: list[Worker], timeout: float) -> list[tuple[bool, Any]]:
        limit, began = timeout, time.monotonic()
        answers: dict[int, tuple[bool, Any]] = {}
        while len(answers) < len(team) and (left := began + limit - time.monotonic()) > 0:
            waiting: dict[Any, int] = {w.pipe: r for r, w in enumerate(team) if r not in answers}
            for pipe in wait(list(waiting), left):
                rank = waiting[pipe]
                answers[rank] = _answer(team[rank])
                if not answers[rank][0]:
                    limit = min(limit, time.monotonic() - began + GRACE_S)
        for rank in set(range(len(team))) - set(answers):
            where = team[rank].stacks()
            answers[rank] = False, f"no answer in time (limit {limit:.3g} s); killed at\n{where}"
        return [answers[rank] for rank in range(len(team))]

    def _replace(self, team: list[Worker]) -> None:
        """Kill the ranks of a failed call: torch counts process groups, and may count differently now."""
        for worker in team:
            worker.kill()
            self._workers.remove(worker)

    def close(self) -> None:
        self._replace(list(self._workers))


def _answer(worker: Worker) -> tuple[bool, Any]:
    try:
        return pickle.loads(worker.pipe.recv_bytes())
    except (EOFError, ConnectionError):
        worker.process.join()
        return False, f"died with exit code {worker.process.exitcode}"


def _serve(pipe: Connection, port: int, stacks: str) -> None:
    """Run jobs until the parent goes; one torch thread."""
    gc.freeze()  # what was imported is no garbage, and takes long to look through
    import torch
    from torch.distributed import TCPStore

    faulthandler.register(signal.SIGUSR1, file=open(stacks, "w"), all_threads=True)  # noqa: SIM115
    store = TCPStore("127.0.0.1", port, is_master=False)  # once: now and then connecting takes 5 s
    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    while True:
        pipe.send_bytes(b"ready")
        try:
            path, job = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        sys.path[:] = path  # test modules without a package live in folders that pytest added later
        try:
            answer = pickle.dumps((True, _run_job(store, *pickle.loads(job))))
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc()))
        pipe.send_bytes(answer)


def _run_job(
    store: Any, fn: Callable[..., Any], args: tuple, rank: int, world_size: int, prefix: str, timeout: float
) -> Any:
    import torch
    import torch.distributed as dist

    torch.manual_seed(0)
    own = dist.PrefixStore(prefix, store)
    limit = timedelta(seconds=timeout)
    dist.init_process_group("gloo", store=own, rank=rank, world_size=world_size, timeout=limit)
    try:
        return fn(*args)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        if "torch.distributed.tensor" in sys.modules:
            from torch.distributed.tensor.debug import _clear_sharding_prop_cache

            # It holds meshes of this job, which look like those of the next one, and whose groups are gone.
            _clear_sharding_prop_cache()
