"""Exchange of gradients by buckets: the interface, and the back end's all-reduce."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.runtime.flight_recorder import label


class Handle(Protocol):
    """Handle of a communication that has begun."""

    def wait(self) -> object:
        """Wait until sent tensors may be overwritten and received ones read."""


@dataclass
class Traffic:
    """Bytes and messages that a rank has sent."""

    num_bytes: int = 0
    num_messages: int = 0


@dataclass(frozen=True)
class Bucket:
    """Gradients that are exchanged together: all in `flat`, each by name in `views`, in the same order."""

    number: int
    flat: Tensor
    views: dict[str, Tensor]


class Exchange(ABC):
    """Replaces buckets by their sums over all replicas, bit for bit the same on each. May keep state.

    Sums are not divided, because the loss is already divided by the global number of tokens. Every replica
    must start the same buckets in the same order.
    """

    name = "allreduce"
    traffic: Traffic | None = None  # what this rank has sent; None if it is not counted

    def begin(self, step: int, scale: float) -> None:  # noqa: B027
        """Begin a step; `scale` is the factor of its loss."""

    @abstractmethod
    def start(self, bucket: Bucket) -> Handle:
        """Start the exchange of a bucket, which must not be used before `Handle.wait` returns."""

    def end(self, *, applied: bool) -> None:  # noqa: B027
        """End a step. A step that was not `applied` leaves the state unchanged."""

    def state(self) -> dict[str, Tensor]:
        """Return the state of this replica by name, to be saved or filled in place."""
        return {}

    def common_state(self) -> dict[str, Tensor]:
        """Return the state that is the same on all replicas."""
        return {}


class BackEnd(Exchange):
    """The back end's all-reduce."""

    def __init__(self, group: dist.ProcessGroup | None = None, dtype: torch.dtype = torch.float32) -> None:
        """Send gradients as `dtype`; sums are rounded to it."""
        self._group = group
        self._dtype = dtype

    def start(self, bucket: Bucket) -> Handle:
        sent = bucket.flat.to(self._dtype)  # the bucket itself if it has this dtype
        label(f"gradient bucket {bucket.number}")
        work = dist.all_reduce(sent, group=self._group, async_op=True)
        assert work is not None, "this rank is not in the group"
        return work if sent is bucket.flat else _CopiedBack(work, sent, bucket.flat)


class _CopiedBack:
    def __init__(self, work: dist.Work, sent: Tensor, into: Tensor) -> None:
        self._work, self._sent, self._into = work, sent, into

    def wait(self) -> None:
        self._work.wait()
        self._into.copy_(self._sent)
