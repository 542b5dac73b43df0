"""Gradients summed over a group when the backward pass is done, in flat buckets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal.runtime.ring import label

_BUCKET_BYTES = 32 << 20


class SumAfterBackward:
    """Sums over the ranks of a group that hold the same part of each parameter, whoever else holds the rest.

    Unlike a communication hook it sees each gradient once and complete, however the backward pass was cut up.
    Sums over different groups may follow each other in any order.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], group: dist.ProcessGroup, dtype: torch.dtype
    ) -> None:
        """Let gradients travel as `dtype`; sums of another format than the gradients' are rounded to it."""
        self._parameters = list(parameters)
        self._group = group
        self._dtype = dtype

    def run(self) -> None:
        """Replace every gradient by its sum. Collective over the group."""
        in_flight = []
        for number, bucket in enumerate(self._buckets()):
            flat = torch.cat([gradient.flatten() for gradient in bucket]).to(self._dtype)
            label(f"gradient bucket {number}")
            in_flight.append((bucket, flat, dist.all_reduce(flat, group=self._group, async_op=True)))
        for bucket, flat, work in in_flight:
            assert work is not None, "this rank is not in the group"
            work.wait()
            for gradient, total in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                gradient.copy_(total.view_as(gradient))

    def _buckets(self) -> Iterator[list[Tensor]]:
        bucket: list[Tensor] = []
        filled = 0
        for gradient in map(local_gradient, self._parameters):
            bucket.append(gradient)
            filled += gradient.nbytes
            if filled >= _BUCKET_BYTES:
                yield bucket
                bucket, filled = [], 0
        if bucket:
            yield bucket


def local_gradient(parameter: nn.Parameter) -> Tensor:
    """Return the part of a gradient that this rank holds, sharing its memory."""
    gradient = parameter.grad
    assert gradient is not None, "a parameter has no gradient"
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
