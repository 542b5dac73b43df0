"""Processes that are killed at a chosen moment of a save.

They are forked from a server that has imported torch already: one costs a tenth of a second, not four.
"""

from __future__ import annotations

import os
import signal
import stat
import sys
from pathlib import Path

from shoal.worker_pool import process_context
from tests.pool import PRELOADED

CHANGES = {"os.rename", "os.mkdir", "os.remove", "os.rmdir"}


def kill_at(event: int) -> None:
    """Kill this process just before its `event`-th change to the file system from now on.

    Where that is the fsync of a file, half of the file is lost as well.
    """
    seen = 0

    def count(fd: int | None = None) -> None:
        nonlocal seen
        seen += 1
        if seen == event:
            if fd is not None and stat.S_ISREG(os.fstat(fd).st_mode):
                # Not by the handle, which may be for reading only.
                os.truncate(f"/proc/self/fd/{fd}", os.fstat(fd).st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    def hook(name: str, args: tuple) -> None:
        if name in CHANGES or (name == "open" and isinstance(args[2], int) and args[2] & os.O_CREAT):
            count()

    sync = os.fsync

    def counting_sync(fd: int) -> None:
        count(fd)
        sync(fd)

    os.fsync = counting_sync
    sys.addaudithook(hook)


def save_and_die(folder: Path, rank: int, world_size: int, victim: int, event: int, retention: dict) -> None:
    """Save step 3 on one rank; the victim is killed at its `event`-th change to the file system."""
    import torch
    import torch.distributed as dist

    from tests.checkpoint.ranks import full_tensors, open_store

    torch.set_num_threads(1)
    rendezvous = dist.FileStore(str(folder.parent / f"store-{victim}-{event}"), world_size)
    dist.init_process_group("gloo", store=rendezvous, rank=rank, world_size=world_size)
    store = open_store(folder, **retention)
    if rank == victim:
        kill_at(event)
    store.save(3, full_tensors(3), {"step": 3}, {"config.toml": b"seed = 1\n"})
    try:
        store.wait()
    except RuntimeError:  # the peer is gone
        os._exit(1)
    os._exit(0)


def run_and_kill(folder: Path, world_size: int, victim: int, event: int, retention: dict) -> list[int]:
    """Return the exit codes of the ranks of one such save."""
    context = process_context(PRELOADED)
    ranks = [
        context.Process(target=save_and_die, args=(folder, rank, world_size, victim, event, retention))
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
        assert process.exitcode is not None, "a survivor hangs"
    return [process.exitcode for process in ranks]
