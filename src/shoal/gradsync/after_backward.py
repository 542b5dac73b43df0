"""Sum gradients over a group after the backward pass, in flat buckets."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal.config.sync_rules import BUCKET_BYTES
from shoal.gradsync.exchange import Bucket, Exchange
from shoal.runtime.mesh import local_gradient


class SumAfterBackward:
    """Sums gradients over the ranks of a group, which hold the same part of each parameter.

    Unlike a communication hook, it gets each gradient once and complete, even if a schedule splits the
    backward pass. Only parameters that are cut alike share a bucket. Tensors that are the same on all ranks
    of an axis then stay the same under an exchange that rounds a value together with its neighbours.
    """

    def __init__(self, named: dict[str, nn.Parameter], exchange: Exchange) -> None:
        self._named = dict(sorted(named.items(), key=lambda item: _cut(item[1])))  # stable
        self._exchange = exchange

    def run(self) -> None:
        """Replace every gradient by its sum. Collective over the exchange's group."""
        in_flight = []
        for number, gradients in enumerate(self._buckets()):
            flat = torch.cat([gradient.flatten() for gradient in gradients.values()])
            parts = flat.split([gradient.numel() for gradient in gradients.values()])
            views = {
                name: part.view_as(gradient)
                for (name, gradient), part in zip(gradients.items(), parts, strict=True)
            }
            in_flight.append((gradients, views, self._exchange.start(Bucket(number, flat, views))))
        for gradients, views, handle in in_flight:
            handle.wait()
            torch._foreach_copy_(list(gradients.values()), list(views.values()))

    def _buckets(self) -> Iterator[dict[str, Tensor]]:
        for _, alike in groupby(self._named.items(), key=lambda item: _cut(item[1])):
            bucket: dict[str, Tensor] = {}
            filled = 0
            for name, parameter in alike:
                bucket[name] = local_gradient(parameter)
                filled += bucket[name].nbytes
                if filled >= BUCKET_BYTES:
                    yield bucket
                    bucket, filled = {}, 0
            if bucket:
                yield bucket


def _cut(parameter: nn.Parameter) -> str:
    return str(parameter.placements) if isinstance(parameter, DTensor) else ""
