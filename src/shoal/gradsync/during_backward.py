"""Sum gradients of plain replicas by bucket during the backward pass."""

# No postponed annotations here: DDP checks those of the hook.

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shoal.gradsync.exchange import Bucket, Exchange, Handle


class SumDuringBackward:
    """DDP communication hook whose waiting is done in `wait`, so that exposed time can be measured.

    Nothing is sent before `begin`: in the first backward pass DDP only orders its buckets.
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
        """Start to exchange buckets."""
        self._sends = True

    def wait(self) -> None:
        """Wait until every bucket holds the sum over all replicas."""
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
