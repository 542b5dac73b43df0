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
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.comm.collectives import all_gather, all_to_all
from shoal.comm.transport import Transport
from shoal.config.sections import Sync

_NESTEROV = ("diloco", "streaming_diloco")
_KEPT = 0.5  # alpha: share of a replica's own weights where the exchange took some steps


@dataclass(frozen=True)
class OuterSgd:
    """How the mean outer gradient moves an anchor."""

    lr: float
    momentum: float = 0.0
    nesterov: bool = False

    def step(self, anchor: Tensor, momentum: Tensor | None, gradient: Tensor) -> None:
        """Move an anchor and its momentum, in place."""
        if momentum is not None:
            momentum.mul_(self.momentum).add_(gradient)
            gradient = gradient.add(momentum, alpha=self.momentum) if self.nesterov else momentum
        anchor.sub_(gradient, alpha=self.lr)


def outer_sgd(sync: Sync, replicas: int) -> OuterSgd:
    """Return what a strategy does, for as many replicas as the run is meant to have."""
    nesterov = sync.strategy in _NESTEROV
    usual = {"model_averaging": 0.0, "block_momentum": 1 - 1 / replicas}.get(sync.strategy, 0.9)
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


def due(step: int, every: int, count: int, last: int) -> list[int]:
    """Return the fragments whose exchange begins after a step: each every so many steps, all at the end."""
    if step == last:
        return list(range(count))
    return [number for number in range(count) if step % every == number * every // count]


class Plain:
    """Values travel as they are."""

    block = 1

    def encode(self, values: Tensor) -> Tensor:
        """Return the bytes that stand for rows of values [n, block]."""
        return values.reshape(-1).view(torch.uint8)

    def decode(self, data: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the rows that some bytes stand for."""
        return data.view(dtype).view(-1, self.block)


class Int8:
    """A row of values travels as whole numbers from -127 to 127 and one fp32 scale."""

    def __init__(self, block: int) -> None:
        self.block = block

    def encode(self, values: Tensor) -> Tensor:
        """Return the bytes that stand for rows of values [n, block]: all scales, then all numbers."""
        scales = (values.abs().amax(1, keepdim=True) / 127).float()
        numbers = (values / scales.clamp_min(torch.finfo(scales.dtype).tiny)).round().to(torch.int8)
        return torch.cat([scales.view(-1).view(torch.uint8), numbers.view(-1).view(torch.uint8)])

    def decode(self, data: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the rows that some bytes stand for."""
        rows = data.numel() // (4 + self.block)
        scales = data[: 4 * rows].clone().view(torch.float32).view(rows, 1)
        return data[4 * rows :].view(torch.int8).view(rows, self.block).to(dtype) * scales.to(dtype)


Codec = Plain | Int8


def pack(tensors: Sequence[Tensor], codec: Codec) -> Tensor:
    """Return tensors as rows [n, codec.block] in host memory; each begins a row, so that no two share one."""
    padded = [torch.nn.functional.pad(t.flatten(), (0, -t.numel() % codec.block)) for t in tensors]
    return torch.cat(padded).view(-1, codec.block).cpu() if padded else torch.zeros(0, codec.block)


def unpack(rows: Tensor, like: Sequence[Tensor], codec: Codec) -> list[Tensor]:
    """Return what was packed, in the shapes and on the devices of `like`."""
    parts = rows.view(-1).split([t.numel() + -t.numel() % codec.block for t in like]) if like else ()
    return [
        part[: t.numel()].view(t.shape).to(t.device, t.dtype) for part, t in zip(parts, like, strict=True)
    ]


@torch.no_grad()
def average(transport: Transport, rows: Tensor, codec: Codec) -> Tensor:
    """Return the mean of all ranks' rows [n, block], the same bits everywhere. Collective over the transport.

    Each rank adds up an nth of the rows, in the order of the ranks, and sends its mean to all: 2 (n - 1) / n
    of the encoded bytes are sent, as in a chunked ring, but a value's bits do not depend on its place. Values
    are encoded twice: what each rank gives, and the mean.
    """
    if transport.size == 1:
        return rows
    sent = [codec.encode(part) for part in rows.tensor_split(transport.size)]
    arrived = [torch.empty_like(sent[transport.rank]) for _ in sent]
    all_to_all(transport, arrived, sent)
    total = codec.decode(arrived[0], rows.dtype).clone()
    for data in arrived[1:]:
        total.add_(codec.decode(data, rows.dtype))
    outputs = [torch.empty_like(data) for data in sent]
    all_gather(transport, outputs, codec.encode(total.div_(transport.size)))
    return torch.cat([codec.decode(data, rows.dtype) for data in outputs])
