"""Ranks of a measurement: new processes, or those that a launcher or mpirun started."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.console import Console

from shoal.comm import mpi_transport
from shoal.comm.collectives import all_gather
from shoal.comm.torch_transport import TorchTransport
from shoal.comm.transport import Transport
from shoal.config.sections import Runtime
from shoal.errors import InputError
from shoal.runtime import process as processes
from shoal.runtime.device import share_cores
from shoal.runtime.process import Process
from shoal.runtime.rank_info import RankInfo, read_rank_info
from shoal.worker_pool import Tell, WorkerPool

Work = Callable[..., Any]  # (transport, tell, *arguments) -> the result of rank 0


def on_ranks(nproc: int, transport: str, work: Work, *arguments: Any, runtime: Runtime | None = None) -> Any:
    """Run a top-level function on every rank; return its result on rank 0, None on other ranks.

    With MPI, `runtime` does not apply.

    Raises:
        InputError: The number of processes is impossible, or a launcher started another number.
    """
    info, runtime = read_rank_info(), runtime or Runtime()
    if nproc < 0 or (info and nproc not in (0, info.world_size)):
        raise InputError(
            f"--nproc {nproc}" + (f", but a launcher started {info.world_size} processes" if info else ""),
            hint="leave --nproc out under a launcher" if info else "use 1 or more",
        )
    if transport == "mpi":
        if info is None:
            raise InputError("--transport mpi must be started by mpirun", hint="mpirun -n 4 shoal bench ...")
        share_cores(info.local_world_size)
        with mpi_transport.world() as ranks:
            return _first(ranks, info, work, arguments)
    if info:
        device = processes.join(runtime).device.torch_device
        try:
            return _first(TorchTransport(device=device), info, work, arguments)
        finally:
            processes.leave()
    preload = (__name__, work.__module__)
    with Console(stderr=True).status("starting") as status, WorkerPool(runtime, preload, nproc or 2) as pool:
        return pool.run("bench", status.update, nproc or 2, _as_rank, work, arguments)[0]


def _as_rank(process: Process, tell: Tell, work: Work, arguments: Sequence[Any]) -> Any:
    return work(TorchTransport(device=process.device.torch_device), tell, *arguments)


def _first(transport: Transport, info: RankInfo, work: Work, arguments: Sequence[Any]) -> Any:
    """Run the work with ranks that may be on several hosts; return its result on rank 0 only."""
    transport.hosts = _hosts(transport, info)

    def tell(word: str) -> None:
        if transport.rank == 0:
            print(word, file=sys.stderr)

    result = work(transport, tell, *arguments)
    return result if transport.rank == 0 else None


def _hosts(transport: Transport, info: RankInfo) -> list[list[int]]:
    """Return the ranks of each host: those whose local ranks start at the same rank. Collective."""
    own = torch.tensor([transport.rank - info.local_rank], device=transport.device)
    firsts = [torch.empty_like(own) for _ in range(transport.size)]
    all_gather(transport, firsts, own)
    hosts: dict[int, list[int]] = {}
    for rank, first in enumerate(firsts):
        hosts.setdefault(int(first.item()), []).append(rank)
    return list(hosts.values())
