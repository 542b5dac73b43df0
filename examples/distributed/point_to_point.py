"""How processes talk in pairs: send and receive, blocking and not.

    python examples/distributed/point_to_point.py

A blocking call returns when the tensor may be used again. An immediate one returns at once: until `wait` the
sent tensor must not be written and the received one not read, for the transfer may come at any moment.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from start import run


def blocking(rank: int, size: int, device: torch.device) -> None:
    """Send a one from rank 0 to rank 1. The receiver brings the memory, of the same size and format."""
    tensor = torch.zeros(1, device=device)
    if rank == 0:
        tensor += 1
        dist.send(tensor, dst=1)
    elif rank == 1:
        dist.recv(tensor, src=0)
    print(f"blocking: rank {rank} has {tensor.item()}")


def immediate(rank: int, size: int, device: torch.device) -> None:
    """Do the same without waiting, with room for other work before `wait`."""
    tensor = torch.zeros(1, device=device)
    if rank < 2:
        tensor += rank == 0
        transfer = dist.isend(tensor, dst=1) if rank == 0 else dist.irecv(tensor, src=0)
        other_work = torch.randn(100, 100, device=device).trace()
        transfer.wait()
        assert other_work.isfinite()
    print(f"immediate: rank {rank} has {tensor.item()}")


def round_and_round(rank: int, size: int, device: torch.device) -> None:
    """Pass a tensor to the right neighbour. All send at once, so nobody may block before it receives."""
    mine, theirs = torch.full((1,), float(rank), device=device), torch.zeros(1, device=device)
    both = [
        dist.P2POp(dist.isend, mine, (rank + 1) % size),
        dist.P2POp(dist.irecv, theirs, (rank - 1) % size),
    ]
    for transfer in dist.batch_isend_irecv(both):
        transfer.wait()
    print(f"ring: rank {rank} has {theirs.item()} of rank {(rank - 1) % size}")


def work(rank: int, size: int, device: torch.device) -> None:
    blocking(rank, size, device)
    immediate(rank, size, device)
    round_and_round(rank, size, device)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--size", type=int, default=2)
    run(work, parser.parse_args().size)
