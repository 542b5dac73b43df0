"""The ranks of a measurement: new processes of this machine, or those that a launcher or mpirun started."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console

from shoal.comm import mpi_transport
from shoal.comm.torch_transport import TorchTransport
from shoal.comm.transport import Transport
from shoal.config.sections import Runtime
from shoal.errors import InputError
from shoal.runtime import process as processes
from shoal.runtime.crew import Crew, Tell
from shoal.runtime.process import Process

Work = Callable[..., Any]  # (transport, tell, *arguments) -> what rank 0 is asked for


def on_ranks(nproc: int, transport: str, work: Work, *arguments: Any) -> Any:
    """Run a top-level function on every rank; return what it returned on rank 0, None on other ranks.

    Raises:
        InputError: No such number of processes, or a launcher started another number.
    """
    if transport == "mpi":
        return _first(mpi_transport.world(), work, arguments)
    if seat := processes.read_seat():
        if nproc not in (0, seat.world_size):
            raise InputError(
                f"--nproc {nproc}, but the launcher started {seat.world_size} processes",
                hint="leave --nproc out under a launcher",
            )
        processes.join(Runtime())
        try:
            return _first(TorchTransport(), work, arguments)
        finally:
            processes.leave()
    with Console(stderr=True).status("starting") as status, Crew(nproc or 2, Runtime(), _PRELOAD) as crew:
        return crew.run("bench", status.update, nproc or 2, _in_crew, work, arguments)[0]


def _in_crew(process: Process, tell: Tell, work: Work, arguments: Sequence[Any]) -> Any:
    return work(TorchTransport(), tell, *arguments)


def _first(transport: Transport, work: Work, arguments: Sequence[Any]) -> Any:
    def tell(word: str) -> None:
        if transport.rank == 0:
            print(word, file=sys.stderr)

    result = work(transport, tell, *arguments)
    return result if transport.rank == 0 else None


_PRELOAD = ("shoal.bench.ranks",)
