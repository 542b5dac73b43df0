"""Transport between processes of different worlds, over gloo groups that meet in a store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from shoal.comm.transport import Transport
from shoal.gradsync.exchange import Handle, Traffic

_SEGMENT_BYTES = 8 << 20  # each such piece of a tensor has a time limit of its own: the link may be slow


class GlooTransport(Transport):
    """Point-to-point operations of gloo groups that torch.distributed keeps no record of.

    There are two groups, so that tensors to higher and to lower ranks use different connections: gloo sends
    nothing before the receiver has announced itself, and on a shared connection an announcement would wait
    behind transfers in its direction. A rank may drop the transport and make another one. Options and devices
    of ProcessGroupGloo are private names of torch, seen on 2.11 to 2.13.
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
        """Connect to the others within `meet_s` for each group; each 8 MiB may take `timeout_s`.

        `address` is the numeric address of this host on the network to the others. Raises RuntimeError if a
        rank does not connect, here, or is lost, later.
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
    """Transfer with a time limit of its own; that of the group is for connecting."""

    def __init__(self, work: dist.Work, limit: timedelta) -> None:
        self._work, self._limit = work, limit

    def wait(self) -> None:
        self._work.wait(self._limit)


def _segments(transfers: list[tuple[Tensor, int]]) -> Iterator[tuple[Tensor, int]]:
    for tensor, other in transfers:
        for part in tensor.split(_SEGMENT_BYTES):
            yield part, other
