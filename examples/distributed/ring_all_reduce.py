"""All-reduce by hand: a ring of whole tensors, and the same in chunks, which sends a fraction of that.

    python examples/distributed/ring_all_reduce.py --size 4 --megabytes 64

With whole tensors each rank sends (n - 1) S bytes, in chunks 2 (n - 1) / n S: at most two tensors, however
many ranks there are. Both stand below; src/shoal/comm/all_reduce.py has them, and others, for every length
and format, with parts of a chunk under way while others are added.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist
from start import run
from torch import Tensor


def pass_on(given: Tensor, taken: Tensor) -> int:
    """Send to the next rank while receiving from the one before; return the bytes sent."""
    rank, size = dist.get_rank(), dist.get_world_size()
    sends = dist.P2POp(dist.isend, given, (rank + 1) % size)
    takes = dist.P2POp(dist.irecv, taken, (rank - 1) % size)
    for under_way in dist.batch_isend_irecv([sends, takes]):  # together: nobody waits before it receives
        under_way.wait()
    return given.nbytes


def ring(total: Tensor) -> int:
    """Let each rank's tensor go all the way round, and add up what comes by."""
    passing, coming = total.clone(), torch.empty_like(total)
    sent = 0
    for _ in range(dist.get_world_size() - 1):
        sent += pass_on(passing, coming)
        total += coming
        passing, coming = coming, passing
    return sent  # ranks add in orders of their own: the last bits may differ between them


def chunked_ring(total: Tensor) -> int:
    """Add up chunk by chunk along the ring, then let the sums go round: everybody has the same bits."""
    rank, size = dist.get_rank(), dist.get_world_size()
    chunks = total.tensor_split(size)
    coming = torch.empty_like(chunks[0])  # the longest
    sent = 0
    for turn in range(size - 1):  # at the end this rank has the sum of chunk rank + 1
        own = chunks[(rank - turn - 1) % size]
        sent += pass_on(chunks[(rank - turn) % size], coming[: len(own)])
        own += coming[: len(own)]
    for turn in range(size - 1):
        sent += pass_on(chunks[(rank + 1 - turn) % size], chunks[(rank - turn) % size])
    return sent


def work(rank: int, size: int, device: torch.device, megabytes: float) -> None:
    generator = torch.Generator().manual_seed(rank)
    tensor = torch.randn(int(megabytes * 2**20 / 4), generator=generator).to(device)
    expected = tensor.clone()
    dist.all_reduce(expected)
    for algorithm in (ring, chunked_ring):
        result = tensor.clone()
        dist.barrier()
        began = time.perf_counter()
        sent = algorithm(result)
        dist.barrier()
        seconds = time.perf_counter() - began
        torch.testing.assert_close(result, expected)  # the order of additions differs, and so the last bits
        of_rank_0 = result.clone()
        dist.broadcast(of_rank_0, src=0)
        assert algorithm is ring or torch.equal(result, of_rank_0), "ranks differ"
        if rank == 0:
            tensors = sent / max(tensor.nbytes, 1)
            print(f"{algorithm.__name__}: sent {tensors:.2f} tensors in {1e3 * seconds:.1f} ms")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--size", type=int, default=4)
    parser.add_argument("--megabytes", type=float, default=16)
    given = parser.parse_args()
    run(work, given.size, given.megabytes)
