"""Devices and the links between them, as the planner sees a cluster (no torch)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shoal.plan.link_cost import Link


@dataclass(frozen=True)
class DeviceSpec:
    """One accelerator, or the share of a CPU that one process gets."""

    name: str
    kind: Literal["cuda", "cpu"]
    memory_bytes: float
    flops: dict[str, float]  # peak of dense matrix products, by number format: fp32, bf16, fp16
    memory_bytes_per_s: float  # peak, of the device's own memory
    host_bytes_per_s: float  # between device and host memory, one way
    usd_per_hour: float = 0.0  # 0: unknown


@dataclass(frozen=True)
class Cluster:
    """Nodes with the same number of the same devices."""

    device: DeviceSpec
    per_node: int
    nodes: int
    inside: Link  # between two devices of a node
    across: Link  # of one device to another node

    @property
    def world_size(self) -> int:
        """Devices in all."""
        return self.per_node * self.nodes

    def link_of(self, size: int, stride: int) -> Link:
        """Return the slowest link of a ring of `size` ranks that are `stride` apart.

        Ranks are numbered node by node; tp is the innermost axis, then dp_shard, dp_replicate, pp.
        """
        return self.inside if size * stride <= self.per_node else self.across
