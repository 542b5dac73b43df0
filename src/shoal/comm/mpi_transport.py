"""Transport over MPI, in host memory."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from shoal.comm.transport import Transport
from shoal.errors import InputError, ShoalError
from shoal.gradsync.exchange import Handle

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm


class MpiTransport(Transport):
    """Point-to-point operations of an MPI communicator that nothing else uses."""

    def __init__(self, communicator: Intracomm) -> None:
        super().__init__(communicator.Get_rank(), communicator.Get_size())
        self._communicator = communicator

    def all_reduce(self, tensor: Tensor, operation: str) -> None:
        from mpi4py import MPI

        names = {"product": MPI.PROD, "maximum": MPI.MAX, "minimum": MPI.MIN}
        try:
            self._communicator.Allreduce(MPI.IN_PLACE, tensor.numpy(), names.get(operation, MPI.SUM))
        except (TypeError, KeyError) as error:  # a format that numpy or MPI lacks
            raise InputError(
                f"MPI cannot add tensors of {tensor.dtype}", hint="choose one of shoal's algorithms"
            ) from error

    def _begin(self, sends: list[tuple[Tensor, int]], receives: list[tuple[Tensor, int]]) -> Sequence[Handle]:
        arriving = [self._communicator.Irecv(tensor.numpy(), source=rank) for tensor, rank in receives]
        return arriving + [self._communicator.Isend(tensor.numpy(), dest=rank) for tensor, rank in sends]


@contextlib.contextmanager
def world() -> Iterator[MpiTransport]:
    """Yield a transport to all ranks of mpirun; an error ends them all. Collective over these ranks."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise InputError(
            f"no MPI could be loaded: {error}", hint="pip install 'shoal[mpi]', or use another transport"
        ) from error
    try:
        yield MpiTransport(MPI.COMM_WORLD.Dup())
    except Exception as error:  # otherwise the others might wait for this rank without end
        told = f"error: {error}" if isinstance(error, ShoalError) else traceback.format_exc()
        print(told, file=sys.stderr, flush=True)
        MPI.COMM_WORLD.Abort(error.exit_code if isinstance(error, ShoalError) else 1)
