"""All-reduce by hand: a ring of whole tensors, and the same in chunks, which sends a fraction of that.

    python examples/distributed/ring_all_reduce.py --size 4 --megabytes 64

With whole tensors each rank sends (n - 1) S bytes, in chunks 2 (n - 1) / n S: at most two tensors, however
many ranks there are. The algorithms, with others, are in src/shoal/comm/all_reduce.py.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist
from start import run

from shoal.comm.all_reduce import all_reduce
from shoal.comm.torch_transport import TorchTransport


def work(rank: int, size: int, device: torch.device, megabytes: float) -> None:
    generator = torch.Generator().manual_seed(rank)
    tensor = torch.randn(int(megabytes * 2**20 / 4), generator=generator).to(device)
    expected = tensor.clone()
    dist.all_reduce(expected)
    for algorithm in ("ring", "chunked_ring"):
        transport = TorchTransport(device=device)
        result = tensor.clone()
        dist.barrier()
        began = time.perf_counter()
        all_reduce(transport, result, algorithm=algorithm)
        dist.barrier()
        seconds = time.perf_counter() - began
        torch.testing.assert_close(result, expected)  # the order of additions differs, and so the last bits
        of_rank_0 = result.clone()
        dist.broadcast(of_rank_0, src=0)
        assert torch.equal(result, of_rank_0), "ranks differ"  # but it is the same order on all ranks
        if rank == 0:
            sent = transport.traffic.num_bytes / max(tensor.nbytes, 1)
            print(f"{algorithm}: sent {sent:.2f} tensors in {1e3 * seconds:.1f} ms")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--size", type=int, default=4)
    parser.add_argument("--megabytes", type=float, default=16)
    given = parser.parse_args()
    run(work, given.size, given.megabytes)
