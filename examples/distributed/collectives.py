"""How processes talk as a group: each collective once, and groups of some ranks.

    python examples/distributed/collectives.py --size 4

Every rank of the group must make the same calls in the same order, or they wait for each other for ever.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from start import run

OPERATIONS = {"SUM": dist.ReduceOp.SUM, "PRODUCT": dist.ReduceOp.PRODUCT}
OPERATIONS |= {"MAX": dist.ReduceOp.MAX, "MIN": dist.ReduceOp.MIN}


def work(rank: int, size: int, device: torch.device) -> None:
    def own() -> torch.Tensor:
        return torch.tensor([rank + 1.0], device=device)

    def blank() -> list[torch.Tensor]:
        return [torch.zeros(1, device=device) for _ in range(size)]

    def say(what: str, *tensors: torch.Tensor) -> None:
        print(f"{what}: rank {rank} has {[tensor.item() for tensor in tensors]}")

    tensor = own()
    dist.broadcast(tensor, src=0)  # rank 0's, to all
    say("broadcast", tensor)

    for name, operation in OPERATIONS.items():
        tensor = own()
        dist.all_reduce(tensor, op=operation)  # in place, on all
        say(f"all_reduce {name}", tensor)

    tensor = own()
    dist.reduce(tensor, dst=0)  # the result on rank 0 only; elsewhere the tensor is of no use afterwards
    if rank == 0:
        say("reduce", tensor)

    tensor = torch.zeros(1, device=device)
    parts = [torch.tensor([10.0 * n], device=device) for n in range(size)] if rank == 0 else None
    dist.scatter(tensor, parts, src=0)  # the nth of rank 0's list, on rank n
    say("scatter", tensor)

    gathered = blank() if rank == 0 else None
    dist.gather(own(), gathered, dst=0)
    if gathered is not None:
        say("gather", *gathered)

    everything = blank()
    dist.all_gather(everything, own())
    say("all_gather", *everything)

    share = torch.zeros(1, device=device)
    dist.reduce_scatter(share, [own() for _ in range(size)])  # the sum of all nth tensors, on rank n
    say("reduce_scatter", share)

    received = blank()
    dist.all_to_all(received, [own() * 10 + other for other in range(size)])  # the nth to rank n
    say("all_to_all", *received)

    pair = dist.new_group([0, 1])  # all ranks make it, members or not
    if rank in (0, 1):
        tensor = torch.ones(1, device=device)
        dist.all_reduce(tensor, group=pair)
        say("all_reduce in a group of two", tensor)

    dist.barrier()  # nobody goes on before all have come
    if rank == 0:
        print("barrier: all have come")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--size", type=int, default=4)
    run(work, parser.parse_args().size)
