"""Weights that have owners, and their gradients."""

import torch

STRATEGIES = ("central_serial", "central_parallel", "device_sharded", "tree_update")
# One has no multiple of 16 elements, of which each weight takes some: 192, 64 and 16 in all.
SHAPES = {"embed": (12, 16), "up": (7, 9), "bias": (16,)}


def gradient(name, rank, dtype=torch.float64):
    generator = torch.Generator().manual_seed(100 * rank + len(name))
    return torch.randn(SHAPES[name], dtype=dtype, generator=generator)
