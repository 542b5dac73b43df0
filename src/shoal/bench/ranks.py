"""The ranks of a measurement: new processes of this machine, or those that a launcher or mpirun started."""

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
from shoal.runtime.crew import Crew, Tell
from shoal.runtime.device import share_cores
from shoal.runtime.process import Process
from shoal.runtime.seat import Seat, read_seat

Work = Callable[..., Any]  # (transport, tell, *arguments) -> what rank 0 is asked for


def on_ranks(nproc: int, transport: str, work: Work, *arguments: Any, runtime: Runtime | None = None) -> Any:
    """Run a top-level function on every rank; return what it returned on rank 0, None on other ranks.

    An MPI's ranks know nothing of `runtime`.

    Raises:
        InputError: No such number of processes, or a launcher started another number.
    """
    seat, runtime = read_seat(), runtime or Runtime()
    if nproc < 0 or (seat and nproc not in (0, seat.world_size)):
        raise InputError(
            f"--nproc {nproc}" + (f", but a launcher started {seat.world_size} processes" if seat else ""),
            hint="leave --nproc out under a launcher" if seat else "use 1 or more",
        )
    if transport == "mpi":
        if seat is None:
            raise InputError("--transport mpi needs ranks of an MPI", hint="mpirun -n 4 shoal bench ...")
        share_cores(seat.local_world_size)
        with mpi_transport.world() as ranks:
            return _first(ranks, seat, work, arguments)
    if seat:
        device = processes.join(runtime).device.torch_device
        try:
            return _first(TorchTransport(device=device), seat, work, arguments)
        finally:
            processes.leave()
    preload = (__name__, work.__module__)
    with Console(stderr=True).status("starting") as status, Crew(nproc or 2, runtime, preload) as crew:
        return crew.run("bench", status.update, nproc or 2, _in_crew, work, arguments)[0]


def _in_crew(process: Process, tell: Tell, work: Work, arguments: Sequence[Any]) -> Any:
    return work(TorchTransport(device=process.device.torch_device), tell, *arguments)


def _first(transport: Transport, seat: Seat, work: Work, arguments: Sequence[Any]) -> Any:
    """Work with ranks that may be on several hosts; return what comes of it on rank 0 only."""
    transport.hosts = _hosts(transport, seat)

    def tell(word: str) -> None:
        if transport.rank == 0:
            print(word, file=sys.stderr)

    result = work(transport, tell, *arguments)
    return result if transport.rank == 0 else None


def _hosts(transport: Transport, seat: Seat) -> list[list[int]]:
    """Return the ranks of each host: those that began to count at the same rank. Collective."""
    own = torch.tensor([transport.rank - seat.local_rank], device=transport.device)
    firsts = [torch.empty_like(own) for _ in range(transport.size)]
    all_gather(transport, firsts, own)
    hosts: dict[int, list[int]] = {}
    for rank, first in enumerate(firsts):
        hosts.setdefault(int(first.item()), []).append(rank)
    return list(hosts.values())
