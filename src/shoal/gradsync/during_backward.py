"""Gradients of plain replicas summed bucket by bucket during the backward pass."""

# No postponed annotations here: DDP checks those of the hook.

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shoal.gradsync.exchange import Bucket, Exchange, Handle


class SumDuringBackward:
    """A DDP communication hook that leaves the waiting to `wait`, so that exposed time can be measured.

    Nothing is sent until `begin`: the first backward pass is there for DDP to order its buckets.
    """

    def __init__(self, named: dict[str, nn.Parameter], exchange: Exchange) -> None:
        self._names = {id(parameter): name for name, parameter in named.items()}
        self._exchange = exchange
        self._in_flight: list[Handle] = []
        self._sends = False

    def attach(self, model: DistributedDataParallel) -> None:
        """Take over the gradient exchange of a DDP model."""
        model.register_comm_hook(None, self._start)

    def begin(self) -> None:
        """Exchange what comes from now on."""
        self._sends = True

    def wait(self) -> None:
        """Return when every bucket holds the sum over all replicas."""
        for handle in self._in_flight:
            handle.wait()
        self._in_flight.clear()

    def _start(self, _state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        names = (self._names[id(parameter)] for parameter in bucket.parameters())
        views = dict(zip(names, bucket.gradients(), strict=True))
        if self._sends:
            self._in_flight.append(self._exchange.start(Bucket(bucket.index(), buffer, views)))
        # DDP only keeps a reference to the buffer; nobody reads it before `wait`.
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(
            devices=[buffer.device] if buffer.is_cuda else None
        )
        future.set_result(buffer)
        return future
