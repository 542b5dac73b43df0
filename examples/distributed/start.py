"""How processes find each other: four ways to start, and the store that each of them ends in.

    python examples/distributed/start.py --size 4 --way environment     (or: file, tcp, store)
    torchrun --nproc-per-node 4 examples/distributed/start.py
    mpirun -n 4 python examples/distributed/start.py

All of them need a place that everybody knows: an address and port, or a file. There rank 0 keeps a store of
keys and values, in which each process leaves its own address for the others. The other examples begin here.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

WAYS = ("environment", "file", "tcp", "store")
TIMEOUT = timedelta(seconds=30)  # torch's own is half an hour


def run(work: Callable[..., None], size: int, *arguments: Any, way: str = "environment") -> None:
    """Call `work(rank, size, device, *arguments)` in `size` processes that have found each other.

    Under torchrun or mpirun this process is one of them already, and `size` and `way` are the launcher's. If
    one fails, the others end, and its number is said.
    """
    if launched := seat_of_launcher():
        rank_process(work, *launched, arguments)
        return
    with tempfile.TemporaryDirectory() as folder:
        place = str(Path(folder) / "store") if way == "file" else str(free_port())
        # From a server without threads, as a fork copies locks that they hold. Elsewhere that is unsafe, too.
        context = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
        context.set_forkserver_preload(["torch"])  # loaded once for all
        ranks = [
            context.Process(target=rank_process, args=(work, rank, size, way, place, arguments), daemon=True)
            for rank in range(size)
        ]
        for process in ranks:
            process.start()
        waiting = {process.sentinel: rank for rank, process in enumerate(ranks)}
        while waiting:
            for sentinel in wait(list(waiting)):
                rank = waiting.pop(sentinel)
                ranks[rank].join()
                if ranks[rank].exitcode:
                    for process in ranks:
                        process.terminate()
                    sys.exit(f"rank {rank} failed with status {ranks[rank].exitcode}")


def seat_of_launcher() -> tuple[int, int, str, str] | None:
    """Return rank, size, way and place that torchrun or mpirun has given this process, or None."""
    env = os.environ
    if "TORCHELASTIC_RUN_ID" in env:
        return int(env["RANK"]), int(env["WORLD_SIZE"]), "environment", ""
    if "OMPI_COMM_WORLD_RANK" in env:  # all on this machine meet at a file with the name of the job
        job = env.get("PMIX_NAMESPACE") or env["OMPI_MCA_ess_base_jobid"]
        place = Path(tempfile.gettempdir()) / f"store-of-{job.replace('/', '-')}"
        return int(env["OMPI_COMM_WORLD_RANK"]), int(env["OMPI_COMM_WORLD_SIZE"]), "file", str(place)
    return None


def rank_process(
    work: Callable[..., None], rank: int, size: int, way: str, place: str, arguments: tuple[Any, ...]
) -> None:
    """Be one rank: join the others, work, leave."""
    torch.set_num_threads(1)
    on_gpus = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", size))  # NCCL: one each
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank))) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    join("nccl" if on_gpus else "gloo", rank, size, way, place)
    work(rank, size, device, *arguments)
    dist.barrier()  # rank 0 keeps the store: it goes last
    dist.destroy_process_group()


def join(backend: str, rank: int, size: int, way: str, place: str) -> None:
    """Find the others. `place` is a port on this machine, or a file that does not exist yet."""
    if way == "environment":  # the variables that torchrun sets; here we do, unless it has
        if place:
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": place}
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size)}
        dist.init_process_group(backend, timeout=TIMEOUT)
    elif way == "file":  # on a folder that all machines share
        dist.init_process_group(
            backend, init_method=f"file://{place}", rank=rank, world_size=size, timeout=TIMEOUT
        )
    elif way == "store":  # of one's own, which may hold other things as well
        store = dist.TCPStore("127.0.0.1", int(place), size, is_master=rank == 0, timeout=TIMEOUT)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    else:
        address = f"tcp://127.0.0.1:{place}"
        dist.init_process_group(backend, init_method=address, rank=rank, world_size=size, timeout=TIMEOUT)


def free_port() -> int:
    """Return a port that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def leave_notes(rank: int, size: int, device: torch.device) -> None:
    """Use the store by hand, as torch does to tell addresses: who comes first gets the first number."""
    store = dist.distributed_c10d._get_default_store()  # made by init_process_group, or given to it
    arrival = store.add("arrivals", 1)  # atomic
    store.set(f"note of rank {rank}", f"rank {rank} of {size} on {device}, number {arrival} to come")
    for other in range(size):
        note = store.get(f"note of rank {other}").decode()  # waits until it is there
        if rank == 0:
            print(note)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--size", type=int, default=4)
    parser.add_argument("--way", choices=WAYS, default="environment")
    given = parser.parse_args()
    run(leave_notes, given.size, way=given.way)
