"""How communication is tied to training: data-parallel SGD by hand, on handwritten digits.

    python examples/distributed/data_parallel.py path/to/mnist --size 4

The folder holds MNIST's IDX files, packed or not. Each process works on its share of every batch and averages
the gradients with the others before each step: so any number of processes ends with the same weights. In
float32 sums in another order round otherwise, and ReLUs make that grow; --dtype float64 shows that it is all.
"""

from __future__ import annotations

import argparse
import gzip
import math
import random
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from start import run
from torch import nn

BATCH = 128  # of all processes together
SEED = 1234


def read_idx(folder: Path, kind: str) -> torch.Tensor:
    """Read all images (images-idx3) or labels (labels-idx1) in a folder, of the training or the test part."""
    tensors = []
    for path in sorted(folder.glob(f"*{kind}*")):
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        dims = data[3]
        shape = [int.from_bytes(data[4 + 4 * dim : 8 + 4 * dim], "big") for dim in range(dims)]
        if data[:3] != b"\x00\x00\x08" or len(data) != 4 + 4 * dims + math.prod(shape):
            raise SystemExit(f"{path} is no IDX file of bytes")
        tensors.append(torch.frombuffer(bytearray(data[4 + 4 * dims :]), dtype=torch.uint8).view(shape))
    if not tensors:
        raise SystemExit(f"{folder} holds no *{kind}* file")
    return torch.cat(tensors)


def load(folder: Path) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Return images and labels to train on, the first eight of ten, and to test on."""
    images = read_idx(folder, "images-idx3").float().div(255).sub(0.1307).div(0.3081).unsqueeze(1)
    labels = read_idx(folder, "labels-idx1").long()
    end = len(images) * 8 // 10
    return (images[:end], labels[:end]), (images[end:], labels[end:])


def shares(count: int, rank: int, size: int, epoch: int) -> list[list[int]]:
    """Return the samples of one rank: its part of each batch of an epoch.

    All ranks shuffle alike and cut the same batches; each takes every size-th sample. To cut the whole set
    into one part a rank, and batches from these, would give other batches for every number of processes. What
    does not divide by the number of processes is left out.
    """
    order = list(range(count))
    random.Random(SEED + epoch).shuffle(order)
    batches = [order[first : first + BATCH] for first in range(0, count, BATCH)]
    return [batch[: len(batch) // size * size][rank::size] for batch in batches if len(batch) >= size]


class Net(nn.Module):
    """Two convolutions, two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 10, 5), nn.Conv2d(10, 20, 5)
        self.linear1, self.linear2 = nn.Linear(320, 50), nn.Linear(50, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(self.conv1(images), 2).relu()
        x = F.max_pool2d(self.conv2(x), 2).relu()
        return self.linear2(self.linear1(x.flatten(1)).relu())


def average_gradients(model: nn.Module, size: int) -> None:
    """Replace each gradient by the mean over all processes: one all-reduce for all of them together."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    for gradient, mean in zip(gradients, flat.div_(size).split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(mean.view_as(gradient))


def work(
    rank: int,
    size: int,
    device: torch.device,
    folder: Path,
    epochs: int,
    dtype: torch.dtype,
    save: Path | None,
) -> None:
    if BATCH % size:
        raise SystemExit(f"a batch of {BATCH} cannot be shared by {size} processes")
    (images, labels), (test_images, test_labels) = load(folder)
    torch.manual_seed(SEED)  # the same first weights on all ranks
    model, images, test_images = Net().to(device, dtype), images.to(dtype), test_images.to(dtype)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    for epoch in range(epochs):
        losses = []
        for share in shares(len(images), rank, size, epoch):
            optimiser.zero_grad()
            loss = F.cross_entropy(model(images[share].to(device)), labels[share].to(device))
            loss.backward()
            average_gradients(model, size)
            optimiser.step()
            losses.append(loss.item())
        print(f"rank {rank}, epoch {epoch + 1}: {sum(losses) / len(losses):.4f}")
    with torch.no_grad():
        right = (model(test_images.to(device)).argmax(1).cpu() == test_labels).float().mean().item()
    if rank == 0:
        print(f"test accuracy {right:.4f}")
        if save is not None:
            torch.save(model.state_dict(), save)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("mnist", type=Path)
    parser.add_argument("--size", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    parser.add_argument("--save", type=Path, help="where rank 0 writes the weights")
    given = parser.parse_args()
    run(work, given.size, given.mnist, given.epochs, getattr(torch, given.dtype), given.save)
