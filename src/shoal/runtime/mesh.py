"""The axes over which processes are laid out, and the process groups along them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shoal.config.layout import Layout
from shoal.runtime.process import Process

AXES = ("pp", "dp_replicate", "dp_shard", "tp")


@dataclass(frozen=True)
class Mesh:
    """This rank's place on every axis, and the groups of the ranks that differ in one axis only."""

    layout: Layout
    pp_rank: int
    dp_rank: int  # over dp_replicate and dp_shard
    tp_rank: int
    axes: DeviceMesh | None  # None where all ranks are replicas: then the world is the only group
    ends: dist.ProcessGroup | None  # with a pipeline: its first and last rank; None on the others

    def __getitem__(self, axis: str) -> DeviceMesh:
        """Return the mesh along one axis."""
        assert self.axes is not None, f"no group along {axis}"
        return self.axes[axis]

    def group(self, axis: str) -> dist.ProcessGroup:
        """Return the process group along one axis."""
        return self[axis].get_group()

    def new_group(self, axis: str, name: str, timeout_s: float) -> dist.ProcessGroup:
        """Make another group along an axis, for what must not mix with others. Collective over the world."""
        ranks = torch.arange(self.layout.world_size).view(_sizes(self.layout))
        return _groups_along(ranks, AXES.index(axis), dist.get_rank(), timedelta(seconds=timeout_s), name)

    @property
    def replica(self) -> int:
        """This rank's place among those that hold the same part of the model."""
        return self.dp_rank // self.layout.dp_shard

    @property
    def part(self) -> int:
        """This rank's place among those that hold a replica together."""
        layout = self.layout
        shard = self.dp_rank % layout.dp_shard
        return (self.pp_rank * layout.dp_shard + shard) * layout.tp + self.tp_rank

    @property
    def is_loss_rank(self) -> bool:
        """Say whether this rank counts its sequences' loss: one of those that hold the same ones does."""
        return self.tp_rank == 0 and self.pp_rank == self.layout.pp - 1


def make_mesh(process: Process, layout: Layout, timeout_s: float) -> Mesh:
    """Make the groups of all axes. Collective over the world."""
    assert layout.world_size == process.world_size, (layout, process.world_size)
    ranks = torch.arange(process.world_size).view(_sizes(layout))
    pp, replicate, shard, tp = (int(place) for place in (ranks == process.rank).nonzero()[0])
    axes, ends = None, None
    if layout.tp * layout.pp > 1 or layout.zero:
        timeout = timedelta(seconds=timeout_s)
        groups = [_groups_along(ranks, axis, process.rank, timeout, name) for axis, name in enumerate(AXES)]
        axes = DeviceMesh.from_group(
            groups, process.device.torch_device.type, mesh=ranks, mesh_dim_names=AXES
        )
    if layout.pp > 1:
        ends = _own_group(ranks[[0, -1]].reshape(2, -1).T.tolist(), process.rank, "ends", timeout)
    return Mesh(layout, pp, replicate * layout.dp_shard + shard, tp, axes, ends)


def _sizes(layout: Layout) -> tuple[int, ...]:
    return (layout.pp, layout.dp_replicate, layout.dp_shard, layout.tp)


def _groups_along(
    ranks: torch.Tensor, axis: int, rank: int, timeout: timedelta, name: str
) -> dist.ProcessGroup:
    lines = ranks.movedim(axis, -1).reshape(-1, ranks.shape[axis]).tolist()
    group = _own_group(lines, rank, name, timeout)
    assert group is not None, f"rank {rank} is on no line along {AXES[axis]}"
    return group


def _own_group(lines: list[list[int]], rank: int, name: str, timeout: timedelta) -> dist.ProcessGroup | None:
    """Make a group for each line of ranks, all ranks in the same order; return the one with this rank."""
    own = None
    for line in lines:
        group = dist.new_group(line, timeout=timeout, group_desc=name)
        own = group if rank in line else own
    return own


def local(parameter: Tensor) -> Tensor:
    """Return the part of a parameter that this rank holds; its gradient goes back to the whole."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def local_gradient(parameter: nn.Parameter) -> Tensor:
    """Return the part of a gradient that this rank holds, sharing its memory."""
    gradient = parameter.grad
    assert gradient is not None, "a parameter has no gradient"
    return local(gradient)
