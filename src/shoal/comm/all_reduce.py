"""All-reduce: five algorithms from point-to-point sends, with the same bits on all ranks, or the back end's.

Bytes that each of n ranks sends for a tensor of S bytes, and rounds in series:

| algorithm | bytes | rounds | use it for |
| --- | --- | --- | --- |
| ring | (n - 1) S | n - 1 | teaching: whole tensors are passed round |
| chunked_ring | 2 (n - 1) / n S | 2 (n - 1) | large tensors |
| tree | S once to its parent, S to each child: log2 n S at the root | 2 log2 n | small tensors |
| halving_doubling | 2 (n - 1) / n S, up to S more if n is no power of 2 | 2 log2 n, or 2 more | both |
| backend | the library's own | | the default |
| hierarchical | tree inside a host, chunked ring between hosts | | few, slow links between hosts |

Sources: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms" (2009), for the chunked ring;
Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH" (2005), for
halving and doubling; the tree pairs ranks as Caffe did, 0-1, 2-3, then 0-2.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from shoal.comm.collectives import add_up_on, broadcast
from shoal.comm.reduction import Reduction
from shoal.comm.transport import Transport
from shoal.errors import InputError
from shoal.gradsync.exchange import Handle

SEGMENT_BYTES = 8 << 20  # sent while the segment before it is added
_Algorithm = Callable[[Transport, Tensor, Reduction], None]


@torch.no_grad()
def all_reduce(
    transport: Transport, tensor: Tensor, operation: str = "sum", algorithm: str = "chunked_ring"
) -> None:
    """Replace a tensor by its reduction over all ranks, the same bits on each. Collective over all ranks.

    Raises:
        InputError: The operation or algorithm is unknown, or does not support this format.
    """
    if algorithm not in ALGORITHMS:
        raise InputError(
            f"unknown all-reduce algorithm {algorithm!r}", hint=f"choose from {', '.join(ALGORITHMS)}"
        )
    reduction = Reduction(operation, tensor.dtype, transport.size)
    flat = tensor.contiguous().view(-1)
    transport.check(flat)
    if algorithm == "backend":
        transport.all_reduce(flat, operation)
    else:
        _BY_SENDING[algorithm](transport, flat, reduction)
    reduction.finish(flat)
    if flat.data_ptr() != tensor.data_ptr():
        tensor.copy_(flat.view_as(tensor))


def _ring(transport: Transport, flat: Tensor, reduction: Reduction) -> None:
    """Pass whole tensors round; each rank keeps all and sums them in the order of ranks, for equal bits."""
    rank, size = transport.rank, transport.size
    right, left = (rank + 1) % size, (rank - 1) % size
    tensors = transport.scratch(flat, size * flat.numel()).view(size, flat.numel()).unbind()
    tensors[rank].copy_(flat)
    for hop in range(size - 1):
        transport.exchange(tensors[(rank - hop) % size], right, tensors[(rank - hop - 1) % size], left)
    flat.copy_(tensors[0])
    for other in tensors[1:]:
        reduction.into(flat, other)


def _chunked_ring(transport: Transport, flat: Tensor, reduction: Reduction) -> None:
    """Pass n chunks round twice: first each is summed on its way to one rank, then all ranks copy it.

    A chunk is sent in segments, each passed on as soon as it is complete, so that one is added while others
    are being sent.
    """
    rank, size = transport.rank, transport.size
    if size == 1:
        return
    right, left = (rank + 1) % size, (rank - 1) % size
    chunks = [_segments(chunk, flat, size) for chunk in flat.tensor_split(size)]
    largest = chunks[0]  # rounding: the first chunk is the largest
    scratch = transport.scratch(flat, sum(segment.numel() for segment in largest))
    buffers = scratch.split([segment.numel() for segment in largest])
    growing = size - 1  # hops until a chunk is complete; from then on it is copied

    def pass_on(hop: int, number: int) -> Handle:
        """Send a segment of the chunk that arrived at the previous hop, and start to receive the next."""
        sent, asked = (chunks[(rank - at) % size][number] for at in (hop, hop + 1))
        into = buffers[number][: asked.numel()] if hop < growing else asked
        return transport.iexchange(sent, right, into, left)

    moving = [pass_on(0, number) for number in range(len(buffers))]
    for hop in range(2 * growing):
        for number, segment in enumerate(chunks[(rank - hop - 1) % size]):
            moving[number].wait()
            if hop < growing:
                reduction.into(segment, buffers[number][: segment.numel()])
            if hop + 1 < 2 * growing:
                moving[number] = pass_on(hop + 1, number)


def _segments(chunk: Tensor, flat: Tensor, size: int) -> list[Tensor]:
    """Cut a chunk into as many segments as the largest chunk of `flat` needs."""
    largest_bytes = -(-flat.numel() // size) * flat.element_size()
    return list(chunk.tensor_split(max(1, -(-largest_bytes // SEGMENT_BYTES))))


def _tree(transport: Transport, flat: Tensor, reduction: Reduction) -> None:
    add_up_on(0, transport, flat, reduction)
    broadcast(transport, flat, 0)


def _halving_doubling(transport: Transport, flat: Tensor, reduction: Reduction) -> None:
    """Halve the part that a pair of ranks reduces until it is 1/n, then gather the parts again.

    Ranks above the largest power of two first send their tensor to a rank below it, and get the result at the
    end.
    """
    rank, size = transport.rank, transport.size
    paired = 1 << (size.bit_length() - 1)
    if rank >= paired:
        transport.send(flat, rank - paired)
        transport.recv(flat, rank - paired)
        return
    if rank + paired < size:
        whole = transport.scratch(flat, flat.numel())
        transport.recv(whole, rank + paired)
        reduction.into(flat, whole)
    scratch = transport.scratch(flat, (flat.numel() + 1) // 2)
    kept: list[tuple[int, Tensor, Tensor]] = []  # partner, own half, its half
    mine, distance = flat, paired // 2
    while distance:
        lower, upper = mine.tensor_split(2)
        mine, theirs = (upper, lower) if rank & distance else (lower, upper)
        arrived = scratch[: mine.numel()]
        transport.exchange(theirs, rank ^ distance, arrived, rank ^ distance)
        reduction.into(mine, arrived)
        kept.append((rank ^ distance, mine, theirs))
        distance //= 2
    for partner, half, other in reversed(kept):
        transport.exchange(half, partner, other, partner)
    if rank + paired < size:
        transport.send(flat, rank + paired)


def _hierarchical(transport: Transport, flat: Tensor, reduction: Reduction) -> None:
    """Reduce to the first rank of each host, all-reduce between these by a chunked ring, then broadcast."""
    inside = transport.group(next(ranks for ranks in transport.hosts if transport.rank in ranks))
    add_up_on(0, inside, flat, reduction)
    if inside.rank == 0:
        _chunked_ring(transport.group([ranks[0] for ranks in transport.hosts]), flat, reduction)
    broadcast(inside, flat, 0)


_BY_SENDING: dict[str, _Algorithm] = {
    "ring": _ring,
    "chunked_ring": _chunked_ring,
    "tree": _tree,
    "halving_doubling": _halving_doubling,
    "hierarchical": _hierarchical,
}
ALGORITHMS = (*_BY_SENDING, "backend")
