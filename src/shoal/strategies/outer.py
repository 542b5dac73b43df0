"""Outer optimiser of replica groups: SGD on the distance that their weights moved from the anchor.

After `every` steps the outer gradient of a replica is anchor - weights. SGD, as in torch, moves the anchor by
the mean of all outer gradients, and all replicas take the anchor as their weights:

| sync.strategy | learning rate | momentum | source |
| --- | --- | --- | --- |
| model_averaging | 1 | none | McDonald and others, iterative parameter mixing (2010) |
| block_momentum | 1 | 1 - 1/n, for n replicas | Chen and Huo, blockwise model-update filtering (2016) |
| diloco | 0.7 | 0.9, Nesterov's | Douillard and others, DiLoCo (2023) |
| streaming_diloco | 0.7 | 0.9, Nesterov's | Douillard and others, with overlap (2025) |

Streaming DiLoCo exchanges one fragment of the model at a time, in the background. The mean of the outer
gradients after step t moves the anchor after step t + overlap. The steps taken meanwhile are kept by half:
weights = alpha weights + (1 - alpha) anchor, with the paper's alpha of 0.5. Without overlap no steps were
taken meanwhile, and the weights become the anchor.

Outer gradients are proportional to the inner learning rate. If momentum accumulated them unchanged, the long
ones of a high rate would still act after the rate has fallen, and the anchor would overshoot. Momentum
therefore accumulates outer gradients divided by the weight of their round: the sum of its inner rates,
relative to a round at the peak rate. The update is multiplied by the weight of its own round, as torch's SGD
multiplies by its current rate. At a constant rate this is the recursion of the papers; with
sync.momentum_follows_lr = false it always is.

Weights that are still far from a minimum do not average well. The first steps may therefore be a warm-up, in
which replicas take the step of their mean gradient (as in Lin and others, post-local SGD, 2020). The inner
optimiser's moments are then those of the whole batch.
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
_KEPT = 0.5  # alpha: share of a replica's own weights if the exchange overlapped some steps


@dataclass(frozen=True)
class OuterSgd:
    """SGD step that moves an anchor by the mean outer gradient."""

    lr: float
    momentum: float = 0.0
    nesterov: bool = False

    def step(self, anchor: Tensor, momentum: Tensor | None, gradient: Tensor, weight: float = 1.0) -> None:
        """Update an anchor and its momentum in place; `weight` is the weight of the round."""
        unit = 1.0
        if momentum is not None and (unit := weight):  # a round at learning rate 0 moves nothing
            gradient = gradient / unit
            momentum.mul_(self.momentum).add_(gradient)
            gradient = gradient.add(momentum, alpha=self.momentum) if self.nesterov else momentum
        anchor.sub_(gradient, alpha=self.lr * unit)


def outer_sgd(sync: Sync, num_replicas: int) -> OuterSgd:
    """Return the outer SGD of a strategy, for the number of replicas in the configuration."""
    nesterov = sync.strategy in _NESTEROV
    usual = {"model_averaging": 0.0, "block_momentum": 1 - 1 / num_replicas}.get(sync.strategy, 0.9)
    lr = sync.lr if sync.lr is not None else 0.7 if nesterov else 1.0
    return OuterSgd(lr, usual if sync.momentum is None else sync.momentum, nesterov)


def mix(weights: Tensor, anchor: Tensor, overlap: int) -> None:
    """Mix the new anchor into weights, in place; `overlap` is the steps since the exchange began."""
    if overlap:
        weights.lerp_(anchor, 1 - _KEPT)
    else:
        weights.copy_(anchor)


def fragments_of(names: Collection[str], count: int, *, decoder: bool) -> list[list[str]]:
    """Assign parameters to fragments by block: block b to fragment b mod count.

    A decoder's parameters outside of blocks go to the first fragment if they come before the blocks, else to
    the last one. In other networks, each layer counts as a block.
    """
    fragments: list[list[str]] = [[] for _ in range(count)]
    layers = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
    for name in names:
        words = name.split(".")
        if not decoder:
            number = layers.index(name.rpartition(".")[0])
        elif words[0] == "blocks":
            number = int(words[1])
        else:
            number = 0 if words[0] in ("embed", "positions") else -1
        fragments[number % count].append(name)
    return fragments


def due(step: int, every: int, count: int, *, all_now: bool) -> list[int]:
    """Return the fragments whose exchange begins after a step: each one `every` steps, or all of them now."""
    if all_now:
        return list(range(count))
    return [number for number in range(count) if step % every == number * every // count]


def round_weight(rate_at: Callable[[int], float], since: int, every: int, offset: int, warmup: int) -> float:
    """Return the sum of a round's inner rates, relative to that of a round at the peak rate.

    The round ends after step `since`. It began at the fragment's exchange before that, or after the warm-up.
    Exchanges of the fragment begin `offset` steps after multiples of `every`. The result depends only on
    steps, so it is the same on all ranks.
    """
    begun = max(since - 1 - (since - 1 - offset) % every, warmup, 0)
    return sum(rate_at(step) for step in range(begun + 1, since + 1)) / every


def pack(tensors: Sequence[Tensor], codec: Codec) -> Tensor:
    """Return tensors as one flat tensor in host memory, each padded to whole blocks of the codec."""
    padded = [torch.nn.functional.pad(t.flatten(), (0, -t.numel() % codec.block)) for t in tensors]
    return torch.cat(padded).cpu() if padded else torch.zeros(0)


def unpack(flat: Tensor, like: Sequence[Tensor], codec: Codec) -> list[Tensor]:
    """Undo `pack`: return tensors in the shapes and on the devices of `like`."""
    parts = flat.split([t.numel() + -t.numel() % codec.block for t in like]) if like else ()
    return [
        part[: t.numel()].view(t.shape).to(t.device, t.dtype) for part, t in zip(parts, like, strict=True)
    ]


@torch.no_grad()
def average(transport: Transport, flat: Tensor, codec: Codec) -> Tensor:
    """Return the mean of all ranks' flat tensors, the same bits on all. Collective over the transport.

    Each rank sums a share in the order of ranks, and sends the mean of that share to all. A rank sends
    2 (n - 1) / n of the encoded bytes, as in a chunked ring, but the bits of a value do not depend on its
    position. Values are encoded twice: the contribution of each rank, and the mean.
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
