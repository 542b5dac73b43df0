"""Tensors between processes that share no world: over gloo groups made for the occasion, in a store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from shoal.comm.transport import Transport
from shoal.gradsync.exchange import Handle, Traffic

_SEGMENT_BYTES = 8 << 20  # of a tensor, each with the time limit of a transfer: a slow link is not a dead one


class GlooTransport(Transport):
    """Point-to-point operations of gloo groups that torch.distributed keeps no record of.

    There are two, so that tensors to higher ranks have other connections than those to lower ones: gloo sends
    nothing before the receiver has announced itself, and an announcement would wait behind transfers
    its way. Whoever drops the transport may make another with others. Options and devices of
    ProcessGroupGloo are private names of torch, seen on 2.11 to 2.13.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        *,
        address: str,
        meet_s: float,
        timeout_s: float,
        traffic: Traffic | None = None,
    ) -> None:
        """Connect to the others, who must come within `meet_s` for each way; 8 MiB may take `timeout_s`.

        `address` is this host's own, numeric, on the way to the others.
        RuntimeError where somebody does not come, or later goes.
        """
        super().__init__(rank, size, traffic=traffic)
        self._groups: list[Any] = []  # to lower ranks, to higher ones
        for way in ("down", "up"):
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._timeout = timedelta(seconds=meet_s)
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
            self._groups.append(dist.ProcessGroupGloo(dist.PrefixStore(way, store), rank, size, options))
        self._timeout = timedelta(seconds=timeout_s)

    def _begin(self, sends: list[tuple[Tensor, int]], receives: list[tuple[Tensor, int]]) -> Sequence[Handle]:
        arriving = [
            self._groups[self.rank > source].recv([part], source, 0) for part, source in _segments(receives)
        ]
        leaving = [self._groups[to > self.rank].send([part], to, 0) for part, to in _segments(sends)]
        return [_Limited(work, self._timeout) for work in (*arriving, *leaving)]


class _Limited:
    """A transfer with a time limit of its own: that of the group is the one of its start."""

    def __init__(self, work: dist.Work, limit: timedelta) -> None:
        self._work, self._limit = work, limit

    def wait(self) -> None:
        self._work.wait(self._limit)


def _segments(transfers: list[tuple[Tensor, int]]) -> Iterator[tuple[Tensor, int]]:
    for tensor, other in transfers:
        for part in tensor.split(_SEGMENT_BYTES):
            yield part, other
