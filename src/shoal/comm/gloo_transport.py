"""Tensors between processes that share no world: over a gloo group made for the occasion, in a store."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from shoal.comm.transport import Handle, Traffic, Transport


class GlooTransport(Transport):
    """Point-to-point operations of a gloo group that torch.distributed keeps no record of.

    Whoever drops it may make another with others. Options and devices of ProcessGroupGloo are private names
    of torch, seen on 2.11 to 2.13.
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
        """Connect to the others, who must come within `meet_s`; a transfer may take `timeout_s`.

        `address` is this host's own, numeric, on the way to the others.
        RuntimeError where somebody does not come, or later goes.
        """
        super().__init__(rank, size, traffic=traffic)
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=meet_s)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        self._group: Any = dist.ProcessGroupGloo(store, rank, size, options)
        self._group._set_default_timeout(timedelta(seconds=timeout_s))

    def _begin(self, sends: list[tuple[Tensor, int]], receives: list[tuple[Tensor, int]]) -> Sequence[Handle]:
        arriving = [self._group.recv([tensor], source, 0) for tensor, source in receives]
        return [*arriving, *(self._group.send([tensor], to, 0) for tensor, to in sends)]
