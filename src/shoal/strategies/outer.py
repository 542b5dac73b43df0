"""The outer step of replicas that train apart: an SGD on how far they have moved from where they agreed.

After `every` steps a replica's outer gradient is anchor - weights. The mean of all replicas' moves the
anchor, by SGD as torch has it, and the anchor becomes everybody's weights:

| sync.strategy | learning rate | momentum | source |
| --- | --- | --- | --- |
| model_averaging | 1 | none | McDonald and others, iterative parameter mixing (2010) |
| block_momentum | 1 | 1 - 1/n, of n replicas | Chen and Huo, blockwise model-update filtering (2016) |
| diloco | 0.7 | 0.9, Nesterov's | Douillard and others, DiLoCo (2023) |
| streaming_diloco | 0.7 | 0.9, Nesterov's | Douillard and others, with overlap (2025) |

Streaming DiLoCo does so with one fragment of the model at a time, and with the exchange in the background:
the mean of what replicas had after step t moves the anchor after step t + overlap. What a replica learned
meanwhile is kept by half: weights = alpha weights + (1 - alpha) anchor, with the paper's alpha of 0.5. With
no overlap nothing was learned meanwhile, and the anchor is taken as it is.

Outer gradients are proportional to the inner learning rate. A momentum that adds them up as they are would go
on with the long ones of a higher rate when the rate has fallen, and overshoot. So it adds up outer gradients
divided by the weight of their round: the sum of its inner rates, relative to a round at the peak rate. The
update is multiplied by the weight of its own round, as torch's SGD multiplies by its current rate. At a
constant rate this is the recursion of the papers; with sync.momentum_follows_lr = false it always is.

Weights that are still far from any minimum do not average well. So first steps may be a warm-up, in which
replicas take the step of their mean gradient (as in Lin and others, post-local SGD, 2020), and the inner
optimiser's moments are those of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.comm.collectives import all_gather, all_to_all
from shoal.comm.transport import Transport
from shoal.config.sections import Sync
from shoal.strategies.codecs import Codec
from shoal.strategies.methods import shares_of

_NESTEROV = ("diloco", "streaming_diloco")
_KEPT = 0.5  # alpha: share of a replica's own weights where the exchange took some steps


@dataclass(frozen=True)
class OuterSgd:
    """How the mean outer gradient moves an anchor."""

    lr: float
    momentum: float = 0.0
    nesterov: bool = False

    def step(self, anchor: Tensor, momentum: Tensor | None, gradient: Tensor, weight: float = 1.0) -> None:
        """Move an anchor and its momentum, in place; `weight` is that of the round."""
        unit = 1.0
        if momentum is not None and (unit := weight):  # where nothing was learned, nothing moves
            gradient = gradient / unit
            momentum.mul_(self.momentum).add_(gradient)
            gradient = gradient.add(momentum, alpha=self.momentum) if self.nesterov else momentum
        anchor.sub_(gradient, alpha=self.lr * unit)


def outer_sgd(sync: Sync, num_replicas: int) -> OuterSgd:
    """Return what a strategy does, for as many replicas as the run is meant to have."""
    nesterov = sync.strategy in _NESTEROV
    usual = {"model_averaging": 0.0, "block_momentum": 1 - 1 / num_replicas}.get(sync.strategy, 0.9)
    lr = sync.lr if sync.lr is not None else 0.7 if nesterov else 1.0
    return OuterSgd(lr, usual if sync.momentum is None else sync.momentum, nesterov)


def mix(weights: Tensor, anchor: Tensor, overlap: int) -> None:
    """Give weights their new anchor, in place; `overlap` is how many steps ago the exchange began."""
    if overlap:
        weights.lerp_(anchor, 1 - _KEPT)
    else:
        weights.copy_(anchor)


def fragments_of(names: Collection[str], count: int) -> list[list[str]]:
    """Share parameters out by blocks, strided: block b to fragment b mod count.

    What is no block goes to the first fragment if it lies before the blocks, else to the last one. In a
    network without blocks, each layer counts as one.
    """
    fragments: list[list[str]] = [[] for _ in range(count)]
    layers = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
    for name in names:
        words = name.split(".")
        if words[0] == "blocks":
            number = int(words[1])
        elif any(layer.startswith("blocks.") for layer in layers):
            number = 0 if words[0] in ("embed", "positions") else -1
        else:
            number = layers.index(name.rpartition(".")[0])
        fragments[number % count].append(name)
    return fragments


def due(step: int, every: int, count: int, *, all_now: bool) -> list[int]:
    """Return the fragments whose exchange begins after a step: each every so many steps, or all of them."""
    if all_now:
        return list(range(count))
    return [number for number in range(count) if step % every == number * every // count]


def round_weight(rate_at: Callable[[int], float], since: int, every: int, offset: int, warmup: int) -> float:
    """Return the sum of a round's inner rates, relative to that of a round at the peak rate.

    The round ends after step `since`, and began after warm-up or where the fragment, whose exchanges begin
    `offset` steps above multiples of `every`, left before. A function of steps alone: the same everywhere.
    """
    begun = max(since - 1 - (since - 1 - offset) % every, warmup, 0)
    return sum(rate_at(step) for step in range(begun + 1, since + 1)) / every


def pack(tensors: Sequence[Tensor], codec: Codec) -> Tensor:
    """Return tensors as one flat one in host memory; each begins a block of the codec, which no two share."""
    padded = [torch.nn.functional.pad(t.flatten(), (0, -t.numel() % codec.block)) for t in tensors]
    return torch.cat(padded).cpu() if padded else torch.zeros(0)


def unpack(flat: Tensor, like: Sequence[Tensor], codec: Codec) -> list[Tensor]:
    """Return what was packed, in the shapes and on the devices of `like`."""
    parts = flat.split([t.numel() + -t.numel() % codec.block for t in like]) if like else ()
    return [
        part[: t.numel()].view(t.shape).to(t.device, t.dtype) for part, t in zip(parts, like, strict=True)
    ]


@torch.no_grad()
def average(transport: Transport, flat: Tensor, codec: Codec) -> Tensor:
    """Return the mean of all ranks' flat tensors, the same bits everywhere. Collective over the transport.

    Each rank adds up a share, in the order of the ranks, and sends its mean to all: 2 (n - 1) / n of the
    encoded bytes are sent, as in a chunked ring, but a value's bits do not depend on its place. Values are
    encoded twice: what each rank gives, and the mean.
    """
    size = transport.size
    if size == 1:
        return flat
    shares, mean = shares_of(flat, size, codec.block), torch.empty_like(flat)
    coded = [codec.encode(share) for share in shares]
    arrived = [torch.empty_like(coded[transport.rank]) for _ in shares]
    all_to_all(transport, arrived, coded)
    total = torch.zeros_like(shares[transport.rank])
    for data in arrived:
        part = torch.empty_like(total)
        codec.decode(data, part)
        total.add_(part)
    means = [torch.empty_like(data) for data in coded]
    all_gather(transport, means, codec.encode(total.div_(size)))
    for data, share in zip(means, shares_of(mean, size, codec.block), strict=True):
        codec.decode(data, share)
    return mean
