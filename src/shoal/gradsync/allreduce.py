"""Gradients summed over all replicas by the back end's all-reduce, bucket by bucket, during the backward."""

# No postponed annotations here: DDP checks those of the hook.

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from shoal.runtime.ring import label


class AllReduce:
    """A DDP communication hook that leaves the waiting to `wait`, so that exposed time can be measured.

    The sum is not divided: the loss already is, by the global number of tokens.
    """

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        """Let gradients travel as `dtype`; sums of another format than the gradients' are rounded to it."""
        self._dtype = dtype
        self._in_flight: list[tuple[dist.Work, torch.Tensor, torch.Tensor]] = []

    def attach(self, model: DistributedDataParallel) -> None:
        """Take over the gradient exchange of a DDP model."""
        model.register_comm_hook(None, self._start)

    def wait(self) -> None:
        """Return when every bucket holds the sum over all replicas."""
        for work, sent, buffer in self._in_flight:
            work.wait()
            if sent is not buffer:
                buffer.copy_(sent)
        self._in_flight.clear()

    def _start(self, _state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        sent = buffer.to(self._dtype)  # the buffer itself where the format is its own
        label(f"gradient bucket {bucket.index()}")
        work = dist.all_reduce(sent, async_op=True)
        assert work is not None, "this rank is in no group"
        self._in_flight.append((work, sent, buffer))
        # DDP only keeps a reference to the buffer; nobody reads it before `wait`.
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(
            devices=[buffer.device] if buffer.is_cuda else None
        )
        future.set_result(buffer)
        return future
