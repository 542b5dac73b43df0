"""Other collectives from point-to-point sends. Each is collective over the transport's ranks.

Names and roles are those of torch.distributed. Tensors are contiguous, and may have any length and format.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.comm.reduction import Reduction
from shoal.comm.transport import Transport


def broadcast(transport: Transport, tensor: Tensor, source: int) -> None:
    """Copy a tensor from one rank to all, by a binary tree."""
    size = transport.size
    place = (transport.rank - source) % size  # 0 is the root
    distance = 1 << (size - 1).bit_length()
    while distance > 1:
        reach, distance = distance, distance // 2
        if place % reach == 0 and place + distance < size:
            transport.send(tensor, (place + distance + source) % size)
        elif place % reach == distance:
            transport.recv(tensor, (place - distance + source) % size)


def reduce(transport: Transport, tensor: Tensor, root: int, operation: str = "sum") -> None:
    """Put the reduction of all ranks' tensors on one rank; on the others the tensor is then undefined."""
    reduction = Reduction(operation, tensor.dtype, transport.size)
    add_up_on(root, transport, tensor, reduction)
    if transport.rank == root:
        reduction.finish(tensor)


def add_up_on(root: int, transport: Transport, tensor: Tensor, reduction: Reduction) -> None:
    """Reduce by a binary tree, without the final step of `Reduction.finish`."""
    size = transport.size
    place = (transport.rank - root) % size
    distance = 1
    while distance < size:
        if place % (2 * distance):
            transport.send(tensor, (place - distance + root) % size)
            return
        if place + distance < size:
            other = transport.scratch(tensor, tensor.numel())
            transport.recv(other, (place + distance + root) % size)
            reduction.into(tensor.view(-1), other)
        distance *= 2


def reduce_scatter(
    transport: Transport, output: Tensor, tensors: Sequence[Tensor], operation: str = "sum"
) -> None:
    """Put the reduction of all ranks' nth tensors on rank n, in a ring."""
    reduction = Reduction(operation, output.dtype, transport.size)
    rank, size = transport.rank, transport.size
    right, left = (rank + 1) % size, (rank - 1) % size
    growing = tensors[left].clone()
    for hop in range(size - 1):
        own = tensors[(rank - hop - 2) % size]
        arrived = torch.empty_like(own)
        transport.exchange(growing, right, arrived, left)
        reduction.into(arrived, own)
        growing = arrived
    output.copy_(growing)
    reduction.finish(output)


def all_gather(transport: Transport, outputs: Sequence[Tensor], tensor: Tensor) -> None:
    """Copy each rank's tensor to all ranks, in a ring."""
    rank, size = transport.rank, transport.size
    outputs[rank].copy_(tensor)
    for hop in range(size - 1):
        sent, arriving = outputs[(rank - hop) % size], outputs[(rank - hop - 1) % size]
        transport.exchange(sent, (rank + 1) % size, arriving, (rank - 1) % size)


def gather(transport: Transport, outputs: Sequence[Tensor], tensor: Tensor, root: int) -> None:
    """Copy each rank's tensor to one rank; the others pass no `outputs`."""
    if transport.rank != root:
        transport.send(tensor, root)
        return
    outputs[root].copy_(tensor)
    arriving = [transport.irecv(outputs[rank], rank) for rank in range(transport.size) if rank != root]
    for one in arriving:
        one.wait()


def scatter(transport: Transport, output: Tensor, tensors: Sequence[Tensor], source: int) -> None:
    """Copy the nth tensor of one rank to rank n; the others pass no `tensors`."""
    if transport.rank != source:
        transport.recv(output, source)
        return
    sending = [transport.isend(tensors[rank], rank) for rank in range(transport.size) if rank != source]
    output.copy_(tensors[source])
    for one in sending:
        one.wait()


def all_to_all(transport: Transport, outputs: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Copy each rank's nth tensor to rank n."""
    rank, size = transport.rank, transport.size
    outputs[rank].copy_(tensors[rank])
    for distance in range(1, size):
        to, source = (rank + distance) % size, (rank - distance) % size
        transport.exchange(tensors[to], to, outputs[source], source)


def barrier(transport: Transport) -> None:
    """Wait until all ranks have called this: in round k each sends to the rank 2^k further on."""
    transport.synchronise()
    rank, size = transport.rank, transport.size
    here, there = torch.ones(2, dtype=torch.uint8, device=transport.device).split(1)
    distance = 1
    while distance < size:
        transport.exchange(here, (rank + distance) % size, there, (rank - distance) % size)
        distance *= 2
    transport.synchronise()
