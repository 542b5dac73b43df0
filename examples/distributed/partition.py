"""How data is cut into one part for each process, of uneven sizes: the classical DataPartitioner.

    python examples/distributed/partition.py --parts 0.7 0.2 0.1

Gradients are summed over all samples and divided by their number, so that each sample has the same weight,
whatever part it is in; the mean of the processes' means would weigh those of small parts more. All samples
are in every step here, so any parts end with the weights of one process (--parts 1). Where batches are drawn
from the parts, they differ with the number of processes: see data_parallel.py.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from start import run
from torch import nn

SEED = 1234
SAMPLES, STEPS = 1000, 100


class Partition:
    """Some samples of a data set."""

    def __init__(self, data: Sequence[Any], numbers: Sequence[int]) -> None:
        self.data, self.numbers = data, numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, place: int) -> Any:
        return self.data[self.numbers[place]]


class DataPartitioner:
    """Cut a data set into parts, in an order that is random and the same on all ranks.

    A part has its share of the samples, rounded down; what is left over is in no part.
    """

    def __init__(
        self, data: Sequence[Any], sizes: Sequence[float] = (0.7, 0.2, 0.1), seed: int = SEED
    ) -> None:
        if min(sizes) <= 0 or sum(sizes) > 1 + 1e-9:
            raise SystemExit(f"parts of {list(sizes)}: give shares above 0 that add up to 1 at the most")
        order = list(range(len(data)))
        random.Random(seed).shuffle(order)
        self.data, self.parts, first = data, [], 0
        for size in sizes:
            end = first + int(size * len(data))
            self.parts.append(order[first:end])
            first = end

    def use(self, k: int) -> Partition:
        """Return part k: the rank's own."""
        return Partition(self.data, self.parts[k])


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    """Return points, and noisy values of a linear function there."""
    generator = torch.Generator().manual_seed(SEED)
    inputs = torch.randn(SAMPLES, 3, generator=generator)
    noise = torch.randn(SAMPLES, 1, generator=generator)
    return inputs, inputs @ torch.tensor([[1.0], [2.0], [3.0]]) + noise


def work(rank: int, size: int, device: torch.device, sizes: Sequence[float]) -> None:
    if len(sizes) != size:
        raise SystemExit(f"{len(sizes)} parts for {size} processes: give one for each")
    own = DataPartitioner(list(zip(*samples(), strict=True)), sizes).use(rank)
    x, y = (torch.stack(part).to(device) for part in zip(*own, strict=True))
    torch.manual_seed(SEED)  # the same first weights on all ranks
    model = nn.Linear(3, 1).to(device)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    count = torch.tensor(float(len(own)), device=device)
    dist.all_reduce(count)  # of all samples
    for _ in range(STEPS):
        optimiser.zero_grad()
        F.mse_loss(model(x), y, reduction="sum").backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= count
        optimiser.step()
    weights = " ".join(f"{weight:.4f}" for weight in model.weight.flatten().tolist())
    print(f"rank {rank}: {len(own)} samples, weights {weights}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--parts", type=float, nargs="+", default=[0.7, 0.2, 0.1], help="one share a rank")
    parts = parser.parse_args().parts
    run(work, len(parts), parts)
