"""Tensors from rank to rank over MPI, in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shoal.comm.transport import Handle, Transport
from shoal.errors import InputError

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm


class MpiTransport(Transport):
    """The ranks of an MPI communicator: those of `mpirun -n 4`."""

    def __init__(self, communicator: Intracomm) -> None:
        super().__init__(communicator.Get_rank(), communicator.Get_size())
        self._communicator = communicator

    def all_reduce(self, tensor: Tensor, operation: str) -> None:
        from mpi4py import MPI

        names = {"product": MPI.PROD, "maximum": MPI.MAX, "minimum": MPI.MIN}
        try:
            buffer = tensor.numpy()
            self._communicator.Allreduce(MPI.IN_PLACE, buffer, names.get(operation, MPI.SUM))
        except (TypeError, KeyError) as error:  # a format that numpy or MPI lacks
            raise InputError(
                f"MPI cannot add tensors of {tensor.dtype}", hint="choose one of shoal's algorithms"
            ) from error

    def _begin(self, sends: list[tuple[Tensor, int]], receives: list[tuple[Tensor, int]]) -> Sequence[Handle]:
        arriving = [self._communicator.Irecv(_as_bytes(tensor), source=rank) for tensor, rank in receives]
        return arriving + [self._communicator.Isend(_as_bytes(tensor), dest=rank) for tensor, rank in sends]


def world() -> MpiTransport:
    """Return the way to all ranks that mpirun started. Collective over them."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise InputError(
            f"no MPI could be loaded: {error}", hint="pip install 'shoal[mpi]', or use another transport"
        ) from error
    return MpiTransport(MPI.COMM_WORLD)


def _as_bytes(tensor: Tensor) -> object:
    if tensor.device.type != "cpu":
        raise InputError(
            f"a tensor on {tensor.device} cannot travel over MPI", hint="use NCCL between GPUs, or the CPU"
        )
    return tensor.view(-1).view(torch.uint8).numpy()
