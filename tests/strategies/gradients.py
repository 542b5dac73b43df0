"""Gradients of several ranks in a bucket, and each way to add them up."""

import torch

from shoal.gradsync.exchange import Bucket
from shoal.strategies.codecs import Bf16, Int8, OneBit
from shoal.strategies.methods import Exact, PowerSGD, TopK, TwoPhase

SHAPES = {"a": (7, 31), "b": (33,), "c": (64, 40)}
NUMEL = 7 * 31 + 33 + 64 * 40
BLOCK = 64
METHODS = {
    "exact": lambda views: Exact("tree"),
    "bf16": lambda views: TwoPhase(Bf16()),
    "int8": lambda views: TwoPhase(Int8(BLOCK)),
    "onebit": lambda views: TwoPhase(OneBit(BLOCK)),
    "onebit, an eighth": lambda views: TwoPhase(OneBit(BLOCK, feedback=0.125)),
    "topk": lambda views: TopK(0.01),
    "topk, an eighth": lambda views: TopK(0.01, feedback=0.125),
    "powersgd": lambda views: PowerSGD(2, views),
}
FEEDBACK = [name for name in METHODS if name not in ("exact", "bf16")]


def bucket_of(flat, shapes=SHAPES):
    """Return a bucket that is a copy of a flat tensor."""
    flat = flat.clone()
    sizes = [torch.Size(shape).numel() for shape in shapes.values()]
    parts = flat.split(sizes)
    return Bucket(0, flat, {name: part.view(shapes[name]) for name, part in zip(shapes, parts, strict=True)})


def gradients(size, numel=NUMEL, dtype=torch.float64, seed=0):
    """Return a flat gradient for each rank, of numbers with few bits, whose sums are exact in float64."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(numel, generator=generator).mul_(256).round_().to(dtype) / 256 for _ in range(size)]
