"""Transport over torch.distributed: gloo between CPUs, NCCL between GPUs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.comm.transport import Transport
from shoal.gradsync.exchange import Handle

_OPERATIONS = {
    "sum": dist.ReduceOp.SUM,
    "average": dist.ReduceOp.SUM,
    "product": dist.ReduceOp.PRODUCT,
    "maximum": dist.ReduceOp.MAX,
    "minimum": dist.ReduceOp.MIN,
}


class TorchTransport(Transport):
    """Point-to-point operations of a process group."""

    def __init__(self, group: dist.ProcessGroup | None = None, device: torch.device | None = None) -> None:
        """Take a process group (default: the world) and the device of the tensors (default: the CPU).

        Collective over the group: NCCL needs all ranks in its first operation.
        """
        super().__init__(dist.get_rank(group), dist.get_world_size(group), device)
        self._group = group
        if self.device.type == "cuda":
            dist.all_reduce(torch.zeros(1, device=self.device), group=group)

    def all_reduce(self, tensor: Tensor, operation: str) -> None:
        dist.all_reduce(tensor, _OPERATIONS[operation], group=self._group)

    def _begin(self, sends: list[tuple[Tensor, int]], receives: list[tuple[Tensor, int]]) -> Sequence[Handle]:
        transfers = [
            dist.P2POp(dist.irecv, tensor, group=self._group, group_peer=r) for tensor, r in receives
        ]
        transfers += [dist.P2POp(dist.isend, tensor, group=self._group, group_peer=r) for tensor, r in sends]
        return dist.batch_isend_irecv(transfers) if transfers else []
