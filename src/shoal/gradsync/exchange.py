"""The exchange that sums gradients of replicas by buckets: the interface, and the back end's all-reduce."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.runtime.flight_recorder import label


class Handle(Protocol):
    """A communication that has begun."""

    def wait(self) -> object:
        """Return when sent tensors may be overwritten and received ones read."""


@dataclass
class Traffic:
    """Bytes and messages that a rank has sent."""

    num_bytes: int = 0
    num_messages: int = 0


@dataclass(frozen=True)
class Bucket:
    """Gradients that are exchanged together: `flat` has all, `views` each by name, in that order."""

    number: int
    flat: Tensor
    views: dict[str, Tensor]


class Exchange(ABC):
    """Replaces buckets by their sums over all replicas, bit for bit the same on each; may keep state.

    Sums are not divided: the loss already is, by the global number of tokens. Every replica starts the same
    buckets in the same order.
    """

    name = "allreduce"
    traffic: Traffic | None = None  # what this rank has sent, where somebody counts

    def begin(self, step: int, scale: float) -> None:  # noqa: B027
        """Begin a step, whose loss was multiplied by `scale`."""

    @abstractmethod
    def start(self, bucket: Bucket) -> Handle:
        """Start the exchange of a bucket; it may not be used until the handle was waited for."""

    def end(self, *, applied: bool) -> None:  # noqa: B027
        """End a step; one that was not `applied` leaves the state unchanged."""

    def state(self) -> dict[str, Tensor]:
        """Return the state of this replica by name, to be saved or filled in place."""
        return {}

    def common_state(self) -> dict[str, Tensor]:
        """Return the state that is the same on all replicas."""
        return {}


class BackEnd(Exchange):
    """The back end's all-reduce."""

    def __init__(self, group: dist.ProcessGroup | None = None, dtype: torch.dtype = torch.float32) -> None:
        """Send gradients as `dtype`, to which sums are rounded."""
        self._group = group
        self._dtype = dtype

    def start(self, bucket: Bucket) -> Handle:
        sent = bucket.flat.to(self._dtype)  # the bucket itself where the format is its own
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
