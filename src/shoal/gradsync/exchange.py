"""How gradients of replicas become their sum, a bucket at a time: the interface, and the back end's way."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.comm.transport import Handle, Traffic
from shoal.runtime.ring import label


@dataclass(frozen=True)
class Bucket:
    """Gradients that travel together: `flat` is all of them, `views` each one in its shape, in that order."""

    number: int
    flat: Tensor
    views: dict[str, Tensor]


class Exchange(ABC):
    """Replaces buckets by their sums over all replicas, the same bits on each, and may keep state for it.

    Sums are not divided: the loss already is, by the global number of tokens. Every replica starts the same
    buckets in the same order.
    """

    name = "allreduce"
    traffic: Traffic | None = None  # what this rank has sent, where somebody counts

    def begin(self, step: int, scale: float) -> None:  # noqa: B027
        """Say which step the next buckets belong to, and by what the loss was multiplied."""

    @abstractmethod
    def start(self, bucket: Bucket) -> Handle:
        """Start an exchange; the bucket is untouched by others until its handle was waited for."""

    def end(self, *, applied: bool) -> None:  # noqa: B027
        """Say whether the step was taken; one that was not leaves no trace in the state."""

    def state(self) -> dict[str, Tensor]:
        """Return by name what this replica keeps from step to step, to be saved or filled in place."""
        return {}

    def common_state(self) -> dict[str, Tensor]:
        """Return the same for what all replicas have alike."""
        return {}


class BackEnd(Exchange):
    """The back end's all-reduce."""

    def __init__(self, group: dist.ProcessGroup | None = None, dtype: torch.dtype = torch.float32) -> None:
        """Let gradients travel as `dtype`; sums of another format than the gradients' are rounded to it."""
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
