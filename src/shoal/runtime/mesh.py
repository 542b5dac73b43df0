"""The axes over which processes are laid out, and the process groups along them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

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

    @property
    def speaks_for_its_tokens(self) -> bool:
        """Say whether this rank counts its sequences' loss: one of those that hold the same ones does."""
        return self.tp_rank == 0 and self.pp_rank == self.layout.pp - 1


def make_mesh(process: Process, layout: Layout, timeout_s: float) -> Mesh:
    """Make the groups of all axes. Collective over the world."""
    sizes = (layout.pp, layout.dp_replicate, layout.dp_shard, layout.tp)
    assert layout.world_size == process.world_size, (layout, process.world_size)
    ranks = torch.arange(process.world_size).view(sizes)
    pp, replicate, shard, tp = (int(place) for place in (ranks == process.rank).nonzero()[0])
    axes, ends = None, None
    if layout.tp * layout.pp > 1 or layout.zero:
        timeout = timedelta(seconds=timeout_s)
        groups = [_groups_along(ranks, axis, process.rank, timeout) for axis in range(len(AXES))]
        axes = DeviceMesh.from_group(
            groups, process.device.torch_device.type, mesh=ranks, mesh_dim_names=AXES
        )
    if layout.pp > 1:
        ends = _own_group(ranks[[0, -1]].reshape(2, -1).T.tolist(), process.rank, "ends", timeout)
    return Mesh(layout, pp, replicate * layout.dp_shard + shard, tp, axes, ends)


def _groups_along(ranks: torch.Tensor, axis: int, rank: int, timeout: timedelta) -> dist.ProcessGroup:
    lines = ranks.movedim(axis, -1).reshape(-1, ranks.shape[axis]).tolist()
    group = _own_group(lines, rank, AXES[axis], timeout)
    assert group is not None, f"rank {rank} is on no line along {AXES[axis]}"
    return group


def _own_group(lines: list[list[int]], rank: int, name: str, timeout: timedelta) -> dist.ProcessGroup | None:
    """Make a group for each line of ranks, all ranks in the same order; return the one with this rank."""
    own = None
    for line in lines:
        group = dist.new_group(line, timeout=timeout, group_desc=name)
        own = group if rank in line else own
    return own
